"""Constraints from what is installed, the dry-run guard, and both together under a real pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import dry_run_guard
import pytest
from flavours import ImageError
from image_world import FakeEnvironment

TOOLS = Path(__file__).resolve().parents[1]


def test_pins_what_is_installed_with_local_versions(fake_environment: FakeEnvironment, tmp_path: Path) -> None:
    fake_environment.install("torch", "2.12.0+rocm7.14", {"torch/__init__.py": ""})
    fake_environment.install("Flash_Attn", "2.8.3", {"flash_attn/__init__.py": ""})
    fake_environment.install("requests", "2.0", {"requests.py": ""})
    done = fake_environment.run("image/constraints.py", "--output", tmp_path / "deep" / "c.txt")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "deep" / "c.txt").read_text().splitlines()
    assert lines[0].startswith("#")
    assert lines[1:] == ["flash-attn==2.8.3", "torch==2.12.0+rocm7.14"]


def test_refuses_without_torch(fake_environment: FakeEnvironment, tmp_path: Path) -> None:
    fake_environment.install("triton", "3.5", {"triton.py": ""})
    done = fake_environment.run("image/constraints.py", "--output", tmp_path / "c.txt")
    assert done.returncode == 1
    assert "no torch in" in done.stderr
    assert "seen: triton" in done.stderr
    assert not (tmp_path / "c.txt").exists()


def test_refuses_a_version_that_cannot_be_pinned(fake_environment: FakeEnvironment, tmp_path: Path) -> None:
    fake_environment.install("torch", "2.12.0", {"torch/__init__.py": ""})
    metadata = fake_environment.site / "torch-2.12.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: torch\n")
    done = fake_environment.run("image/constraints.py", "--output", tmp_path / "c.txt")
    assert done.returncode == 1
    assert "torch is installed without a version" in done.stderr


@pytest.mark.parametrize(
    ("version", "text", "said"),
    [
        ("2.13.0+cu130", "x = 1", "torch was 2.12.0+rocm7.14 and is 2.13.0+cu130"),
        ("2.12.0+rocm7.14", "x = 2", "torch 2.12.0+rocm7.14 was rebuilt"),
        ("2.12.0+rocm7.14", "x = 1", ""),
    ],
)
def test_compares_with_the_base(
    fake_environment: FakeEnvironment, tmp_path: Path, version: str, text: str, said: str
) -> None:
    fake_environment.install("torch", "2.12.0+rocm7.14", {"torch/__init__.py": "x = 1"})
    record = tmp_path / "base.json"
    first = fake_environment.run("image/constraints.py", "--output", tmp_path / "c.txt", "--record", record)
    assert first.returncode == 0
    fake_environment.install("torch", version, {"torch/__init__.py": text})
    fake_environment.install("vllm", "0.29.0", {"vllm.py": ""})
    fake_environment.install("numpy", "1.26.4", {"numpy.py": ""})
    again = ["--output", str(tmp_path / "c.txt"), "--unchanged-since", str(record), "--also", "numpy"]
    done = fake_environment.run("image/constraints.py", *again)
    assert done.returncode == (1 if said else 0), done.stderr
    assert said in done.stderr
    if not said:
        assert (tmp_path / "c.txt").read_text().split()[-3:] == [
            "numpy==1.26.4",
            "torch==2.12.0+rocm7.14",
            "vllm==0.29.0",
        ]


def plan(tmp_path: Path, *items: tuple[str, bool]) -> Path:
    install = [{"metadata": {"name": name, "version": "1.0"}, "is_direct": direct} for name, direct in items]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": "1", "install": install}))
    return path


@pytest.mark.parametrize(
    ("items", "options", "code"),
    [
        ([("httpx", False)], [], 0),
        ([], [], 0),
        ([("httpx", False), ("torch", False)], [], 1),
        ([("Flash_Attn", False)], [], 1),
        ([("vllm", False)], ["--built-here", "vllm"], 1),
        ([("vllm", True)], ["--built-here", "vllm"], 0),
        ([("vllm", True)], [], 1),
        ([("vllm", True), ("torchvision", False)], ["--built-here", "vllm"], 1),
    ],
)
def test_guard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], items: list[tuple[str, bool]], options: list[str], code: int
) -> None:
    assert dry_run_guard.main([*options, str(plan(tmp_path, *items))]) == code
    said = capsys.readouterr()
    assert ("would be installed from" in said.err) is (code == 1)


@pytest.mark.parametrize("text", ["", "{}", '{"version": "2", "install": []}', '{"version": "1", "install": [{}]}'])
def test_guard_never_passes_a_report_it_cannot_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ImageError):
        dry_run_guard.read_plan(path)
    assert dry_run_guard.main([str(path)]) == 1
    assert dry_run_guard.main([str(tmp_path / "absent.json")]) == 1


@pytest.fixture(scope="module")
def real_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, timeout=120, capture_output=True)
    return folder / "env" / "bin" / "python"


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {text}\n" for text in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_guarded_install_with_a_real_pip(real_pip: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "torch", "2.12.0+rocm7.14")
    wheel(wheels, "torch", "2.13.0")
    wheel(wheels, "torchvision", "0.28.0")
    wheel(wheels, "harmless", "1.0", "torch>=2.6")
    wheel(wheels, "greedy", "1.0", "torch>=2.13")
    wheel(wheels, "companion", "1.0", "torchvision")
    env = {"PATH": os.environ["PATH"], "PYTHON": str(real_pip), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"

    def run(*command: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        text = [str(part) for part in command]
        return subprocess.run(text, env={**env, **extra}, capture_output=True, text=True, timeout=120, check=False)

    constraints = str(tmp_path / "constraints.txt")
    install = TOOLS / "image" / "guarded_install.sh"
    assert run(real_pip, "-m", "pip", "install", "torch==2.12.0+rocm7.14").returncode == 0
    assert "name the generated constraints file" in run(install, "harmless").stderr
    assert "missing or empty" in run(install, "harmless", PIP_CONSTRAINT=constraints).stderr
    assert run(real_pip, TOOLS / "image" / "constraints.py", "--output", constraints).returncode == 0

    done = run(install, "harmless", PIP_CONSTRAINT=constraints)
    assert done.returncode == 0, done.stderr
    assert "none of them protected" in done.stdout
    # The constraint makes the resolver itself refuse; the guard catches what no constraint could name.
    assert run(install, "greedy", PIP_CONSTRAINT=constraints).returncode != 0
    done = run(install, "companion", PIP_CONSTRAINT=constraints)
    assert done.returncode == 1
    assert "torchvision 0.28.0 would be installed from an index" in done.stderr
    frozen = run(real_pip, "-m", "pip", "freeze").stdout
    assert "torch==2.12.0+rocm7.14" in frozen
    assert "companion" not in frozen
