"""What Ray and vLLM do with the variables, asked of their own code: our rules stand on it."""

import ast
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from vime_devices import Platform, child_environment, ray_environment

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NOSET_HIP, NOSET_CUDA = (f"RAY_EXPERIMENTAL_NOSET_{name}" for name in (HIP, CUDA))


@pytest.fixture(autouse=True)
def no_masks():
    with patch.dict(os.environ):  # Ray and vLLM write to it; everything they wrote goes with the test
        for name in (HIP, CUDA, ROCR, NOSET_HIP, NOSET_CUDA):
            os.environ.pop(name, None)
        yield


@pytest.fixture
def amd():
    pytest.importorskip("ray", reason="Ray is not installed; its AMD manager is what is asked here")
    from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager

    return AMDGPUAcceleratorManager


@pytest.fixture
def nvidia():
    pytest.importorskip("ray", reason="Ray is not installed; its NVIDIA manager is what is asked here")
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager


def test_ray_stops_under_rocr_alone(amd, monkeypatch):
    monkeypatch.setenv(ROCR, "0")
    with pytest.raises(RuntimeError, match="Please use HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES"):
        amd.get_visible_accelerator_ids_env_var()
    monkeypatch.setenv(HIP, "0")
    assert amd.get_visible_accelerator_ids_env_var() == HIP, "Ray changed the variable it writes: revisit hip_rules.py"


def test_ray_writes_the_hip_variable_only(amd, monkeypatch):
    monkeypatch.setenv(CUDA, "0,1")
    amd.set_current_process_visible_accelerator_ids(["3"])
    assert (os.environ[HIP], os.environ[CUDA]) == ("3", "0,1")


def test_rays_amd_manager_obeys_our_switch(amd, monkeypatch):
    for name, value in ray_environment(Platform.HIP).items():
        monkeypatch.setenv(name, value)
    amd.set_current_process_visible_accelerator_ids(["3"])
    assert HIP not in os.environ, "Ray ignores the NOSET switch: revisit ray_environment"


def test_rays_nvidia_manager_obeys_it_on_both_platforms(nvidia, monkeypatch):
    # Where Ray finds no amdsmi it takes an AMD machine for an NVIDIA one; hence both switches on HIP.
    for platform in (Platform.HIP, Platform.CUDA):
        for name, value in ray_environment(platform).items():
            monkeypatch.setenv(name, value)
        nvidia.set_current_process_visible_accelerator_ids(["3"])
        assert CUDA not in os.environ, f"Ray ignores the NOSET switch on {platform}: revisit ray_environment"


def test_ray_takes_only_1_and_true(amd, monkeypatch):
    for value, obeyed in (("1", True), ("true", True), ("TRUE", True), ("0", False), ("yes", False), ("", False)):
        os.environ.pop(HIP, None)
        monkeypatch.setenv(NOSET_HIP, value)
        amd.set_current_process_visible_accelerator_ids(["3"])
        assert (HIP not in os.environ) is obeyed, f"Ray reads {value!r} differently: revisit the rule noset-value"


def test_no_code_of_ray_reads_the_rocr_switch():
    spec = importlib.util.find_spec("ray")
    if spec is None:
        pytest.skip("Ray is not installed; its sources are what is read here")
    folder = Path(spec.origin).parent / "_private" / "accelerators"
    sources = [path.read_text() for path in folder.glob("*.py")]
    assert sources, "Ray moved its accelerator managers: revisit the rule noset-rocr"
    assert not any("NOSET_ROCR" in text for text in sources), "Ray reads NOSET_ROCR now: revisit the rule noset-rocr"


def vllm_sync_function():
    """Compile vLLM's own check out of its source: importing the module needs a ROCm build."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed; its source is what is read here")
    source = (Path(spec.origin).parent / "platforms" / "rocm.py").read_text()
    name = "_sync_hip_cuda_env_vars"
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"vLLM no longer has {name}: revisit the rule hip-cuda-differ"
    # Releases before 0.32 warn of the second name there.
    namespace = {"os": os, "logger": SimpleNamespace(warning_once=lambda *_text, **_scope: None)}
    exec(compile(ast.Module(found, []), "rocm.py", "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("hip", "cuda", "raises"),
    [("0,1", "0,1", False), ("0,1", "1,0", True), ("0,1", "0, 1", True), ("", "0", False), ("0", None, False)],
)
def test_vllm_compares_texts(monkeypatch, hip, cuda, raises):
    sync = vllm_sync_function()
    for name, value in ((HIP, hip), (CUDA, cuda)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if raises:
        with pytest.raises(ValueError, match="Inconsistent GPU visibility env vars"):
            sync()
    else:
        sync()
        assert (os.environ[HIP] or cuda) == os.environ[CUDA]


def test_vllm_is_content_with_what_we_write(monkeypatch):
    sync = vllm_sync_function()
    child = child_environment(Platform.HIP, own=["3"], node=[str(i) for i in range(8)], base={})
    for name in (HIP, CUDA):
        monkeypatch.setenv(name, child.env[name])
    sync()
    assert os.environ[CUDA] == child.mask
