"""The smaller programs of the images: requirements without protected packages, ROCm paths, the health check."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import health
import pytest
import rocm_paths
import unprotected
from flavours import ImageError
from image_world import FakeEnvironment
from verify import probe
from verify.devices import architecture_faults, attention_faults


def test_build_requirements_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[build-system]\nrequires = ["cmake>=3.26.1", "torch == 2.11.0", "setuptools>=77.0.3,<80"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    assert unprotected.main(["--build", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == ["cmake>=3.26.1", "setuptools>=77.0.3,<80"]


def test_requirements_of_an_installed_distribution(fake_environment: FakeEnvironment) -> None:
    requires = ["torch==2.11.0", "Flash-Attn", "numba", "mistral_common[image]>=1.11", 'ray>=2; extra == "ray"']
    fake_environment.install("vllm", "0.29.0", {"vllm.py": ""}, requires)
    done = fake_environment.run("image/unprotected.py", "--installed", "vllm")
    assert done.stdout.splitlines() == ["numba", "mistral_common[image]>=1.11"]
    done = fake_environment.run("image/unprotected.py", "--installed", "absent")
    assert done.returncode == 1
    assert "absent is not installed" in done.stderr


def test_a_tree_without_a_build_system_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no readable"):
        unprotected.of_build(tmp_path)


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    for folder in ("_rocm_sdk_core/share/amd_smi/amdsmi", "_rocm_sdk_core/lib", "_rocm_sdk_devel/lib"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "_rocm_sdk_core/lib/libamdhip64.so.7").write_bytes(b"hip 7.14")
    (tmp_path / "_rocm_sdk_devel/lib/libamdhip64.so").symlink_to(tmp_path / "_rocm_sdk_core/lib/libamdhip64.so.7")
    return tmp_path


def test_rocm_paths_are_exposed_once(sdk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert rocm_paths.main(["--site", str(sdk), "--links", str(sdk / "links")]) == 0
        assert capsys.readouterr().out.strip() == str(sdk / "_rocm_sdk_devel")
    assert (sdk / rocm_paths.PTH).read_text().strip() == str(sdk / "_rocm_sdk_core/share/amd_smi")
    assert (sdk / "links/libamdhip64.so").resolve().read_bytes() == b"hip 7.14"


def test_two_hip_runtimes_are_refused(sdk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sdk / "_rocm_sdk_core/lib/libamdhip64.so.6").write_bytes(b"hip 6.4")
    assert rocm_paths.main(["--site", str(sdk), "--links", str(sdk / "links")]) == 1
    assert "expected one" in capsys.readouterr().err
    assert not (sdk / rocm_paths.PTH).exists()


def test_a_base_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="_rocm_sdk_core is missing"):
        rocm_paths.expose(tmp_path, tmp_path / "links")


def container(root: Path, *nodes: str) -> Path:
    (root / "dev/shm").mkdir(parents=True)
    for name in nodes:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    return root


@pytest.mark.parametrize(
    ("platform", "nodes", "said"),
    [
        ("rocm", [], "/dev/kfd is missing: --device=/dev/kfd"),
        ("rocm", ["kfd"], "/dev/dri holds no render node"),
        ("rocm", ["kfd", "dri/renderD128"], ""),
        ("cuda", [], "/dev/nvidiactl is missing: --gpus all"),
        ("cuda", ["nvidiactl"], ""),
    ],
)
def test_health_names_the_option_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, nodes: list[str], said: str
) -> None:
    monkeypatch.setattr(health, "ENOUGH_SHM", 0)
    monkeypatch.setattr(health, "ENOUGH_FILES", 0)
    found = health.problems(platform, container(tmp_path, *nodes))
    assert "; ".join(found).startswith(said)
    assert bool(found) is bool(said)


def test_health_knows_no_other_platform(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for platform in ("", "cpu"):
        monkeypatch.setenv("VIME_IMAGE_PLATFORM", platform)
        assert health.main([]) == 1
        assert f"the platform is {platform!r}" in capsys.readouterr().err
    assert health.main(["--platform", "neither"]) == 1


def test_health_sees_rights_shared_memory_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ENOUGH_SHM", 1 << 60)
    monkeypatch.setattr(health, "ENOUGH_FILES", 1 << 60)
    # A test may run as root, to whom every node is open.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "renderD129")
    root = container(tmp_path, "kfd", "dri/renderD128", "dri/renderD129")
    rights, shm, files = health.problems("rocm", root)
    assert rights == f"no right to open {root / 'dev/dri/renderD129'}: --group-add <group of that node>"
    assert "--ipc=host or --shm-size" in shm
    assert "--ulimit nofile=1048576:1048576" in files
    assert health.problems("rocm", tmp_path / "empty")[1].endswith("is missing: --ipc=host")


@pytest.mark.parametrize(
    ("platform", "arch", "built", "image", "said"),
    [
        ("rocm", "gfx942", ["gfx90a", "gfx942"], "gfx942", ""),
        ("rocm", "gfx942", ["gfx942"], "", ""),
        ("rocm", "gfx950", ["gfx942"], "gfx950", "torch was built for gfx942"),
        ("rocm", "gfx950", ["gfx942", "gfx950"], "gfx90a;gfx942", "vLLM was built for gfx90a, gfx942"),
        ("cuda", "sm_90", ["sm_80", "sm_90"], "", ""),
        ("cuda", "sm_103", ["sm_90", "sm_100"], "", ""),
        ("cuda", "sm_100", ["sm_80", "sm_90"], "", "torch was built for sm_80, sm_90"),
    ],
)
def test_architectures(platform: str, arch: str, built: list[str], image: str, said: str) -> None:
    found = architecture_faults(platform, [["A GPU", arch]], built, {"PYTORCH_ROCM_ARCH": image})
    assert bool(found) is bool(said)
    assert "; ".join(found).endswith(said)


def test_an_attention_kernel_that_does_not_work_says_why() -> None:
    works = {"FLASH_ATTENTION": "", "CUDNN_ATTENTION": "no engine", "MATH": ""}
    assert attention_faults(works) == ([], "FLASH_ATTENTION, not CUDNN_ATTENTION (no engine), MATH")
    refused = works | {"FLASH_ATTENTION": "not for this architecture"}
    assert attention_faults(refused)[0] == [
        "not FLASH_ATTENTION (not for this architecture), not CUDNN_ATTENTION (no engine), MATH"
    ]
    assert attention_faults({"MATH": ""})[0], "a kernel that was not tried does not work"


def test_a_helper_that_holds_the_pipes_does_not_hold_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    command = ["sh", "-c", "setsid sleep 300 & echo $!; wait"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    helper = int(child.stdout.readline())
    try:
        child.kill()
        assert probe._last_words(child) == ("", "(a helper of the interpreter holds its pipes)")
        assert child.returncode == -signal.SIGKILL, "it is reaped"
    finally:
        os.kill(helper, signal.SIGKILL)
