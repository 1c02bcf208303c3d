"""Detection from device nodes, without torch."""

import sys

import pytest
from vime_devices import Platform, PlatformError, detect_platform
from vime_devices.platforms import has_amd_devices, has_nvidia_devices, torch_build


def amd(root, kfd, gpus):
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/kfd").touch()
    target = root / "sys/class/kfd/kfd"
    target.mkdir(parents=True)
    kfd(gpus).rename(target / "topology")


def nvidia(root):
    (root / "dev").mkdir(exist_ok=True)
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()


def test_nothing(tmp_path):
    assert detect_platform(tmp_path) is Platform.CPU


def test_amd(tmp_path, kfd, gpu):
    amd(tmp_path, kfd, [gpu(0)])
    assert detect_platform(tmp_path) is Platform.HIP


def test_a_driver_without_a_gpu_is_no_platform(tmp_path, kfd):
    amd(tmp_path, kfd, [])
    (tmp_path / "dev/nvidiactl").touch()
    assert detect_platform(tmp_path) is Platform.CPU


def test_a_node_that_cannot_be_read_counts_for_nothing(tmp_path, kfd, gpu):
    amd(tmp_path, kfd, [gpu(0)])
    properties = tmp_path / "sys/class/kfd/kfd/topology/nodes/2/properties"
    properties.unlink()
    properties.mkdir()  # reading a folder fails whoever runs the tests
    assert not has_amd_devices(tmp_path)


def test_a_node_without_a_count(tmp_path, kfd, gpu):
    amd(tmp_path, kfd, [gpu(0)])
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/2/properties").write_text("domain 0\n")
    assert not has_amd_devices(tmp_path)


def test_nvidia(tmp_path):
    nvidia(tmp_path)
    assert detect_platform(tmp_path) is Platform.CUDA


def test_nvidia_by_its_driver_list_and_under_wsl(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "proc/driver/nvidia/gpus/0000:41:00.0").mkdir(parents=True)
    assert has_nvidia_devices(one)
    (two / "dev").mkdir(parents=True)
    (two / "dev/dxg").touch()
    assert not has_nvidia_devices(two)
    (two / "usr/lib/wsl/lib").mkdir(parents=True)
    (two / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert has_nvidia_devices(two)


@pytest.mark.parametrize("build", [Platform.HIP, Platform.CUDA])
def test_both_vendors_and_torch_decides(tmp_path, kfd, gpu, build):
    amd(tmp_path, kfd, [gpu(0)])
    nvidia(tmp_path)
    assert detect_platform(tmp_path, build=build) is build


def test_both_vendors_and_nothing_decides(tmp_path, kfd, gpu, monkeypatch):
    amd(tmp_path, kfd, [gpu(0)])
    nvidia(tmp_path)
    monkeypatch.setattr("vime_devices.platforms.torch_build", lambda: None)
    with pytest.raises(PlatformError, match="cannot tell"):
        detect_platform(tmp_path)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", Platform.CUDA),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n", Platform.HIP),
        ("cuda = None\nhip = None\n", Platform.CPU),
        ('hip = "6.4"\n', Platform.HIP),
    ],
)
def test_what_torch_was_built_for_is_read_as_text(tmp_path, text, build):
    (tmp_path / "version.py").write_text(text)
    assert torch_build(tmp_path / "version.py") is build


def test_no_torch(tmp_path, monkeypatch):
    assert torch_build(tmp_path / "version.py") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_build() is None


def test_the_installed_torch_agrees_with_its_version_file():
    torch = pytest.importorskip("torch", reason="torch is not installed; its version.py is the input here")
    expected = Platform.HIP if torch.version.hip else Platform.CUDA if torch.version.cuda else Platform.CPU
    assert torch_build() is expected
    assert "torch" in sys.modules
