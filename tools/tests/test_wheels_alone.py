"""Each distribution is built, installed alone into a fresh environment, and imported there.

This is what `pip install vime-sync` means to somebody who uses nothing else of the workspace: a missing dependency, a
file left out of the wheel or an import that only works inside the checkout shows here and nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
MEMBERS = ["packages/vime-devices", "packages/vime-sync", "packages/vime-megatron", "packages/vime-rollout"]
MEMBERS += ["packages/vime-grpo", "integration"]

# What must not be importable after the package was installed alone: the promise of a small install.
ABSENT = {
    "vime-devices": ["torch", "numpy", "pydantic", "ray", "vllm", "megatron", "vime_sync"],
    "vime-sync": ["vllm", "ray", "megatron", "transformers", "vime_rollout", "vime_grpo"],
    "vime-megatron": ["vllm", "ray", "vime_rollout", "vime_grpo"],
    "vime-rollout": ["vllm", "ray", "megatron", "vime_megatron", "vime_grpo"],
    "vime-grpo": ["vllm", "ray", "megatron", "transformers", "vime_sync", "vime_rollout"],
    "vime-integration": [],
}
# A module that must not even be imported by `import <package>`: it is there for some functions only.
LAZY = {"vime-devices": ["torch"], "vime-rollout": ["torch", "transformers"], "vime-grpo": ["torch"]}

CHECK = """
import importlib, importlib.metadata, importlib.util, json, pathlib, sys
name, absent, lazy = json.loads(sys.argv[1])
module = importlib.import_module(name.replace("-", "_"))
where = pathlib.Path(module.__file__).parent
loaded = [m for m in lazy if m in sys.modules]  # before the door is tried: it loads what it names
print(json.dumps({
    "version": importlib.metadata.version(name),
    "inside": str(where).startswith(sys.prefix),
    "typed": (where / "py.typed").is_file(),
    "door": all(hasattr(module, n) for n in getattr(module, "__all__", [])),
    "present": [m for m in absent if importlib.util.find_spec(m) is not None],
    "loaded": loaded,
}))
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for member in MEMBERS:
        run(UV, "build", "--quiet", "--wheel", "--out-dir", out, ROOT / member)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("member", MEMBERS)
def test_installs_and_imports_alone(member: str, wheels: Path, tmp_path: Path) -> None:
    name = "vime-integration" if member == "integration" else Path(member).name
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    # The workspace's pins and date hold here too (uv reads them from the root), so that the test is reproducible.
    # Run outside the checkout, so that nothing but the wheels can be found.
    options: list[str | Path] = ["--quiet", "--python", python, "--find-links", wheels]
    options += ["--override", override(tmp_path)]
    run(UV, "pip", "install", *options, "--exclude-newer", exclude_newer(), name, cwd=tmp_path)
    seen = json.loads(run(python, "-c", CHECK, json.dumps([name, ABSENT[name], LAZY.get(name, [])]), cwd=tmp_path))
    assert seen == {"version": "0.1.0", "inside": True, "typed": True, "door": True, "present": [], "loaded": []}


def test_devices_mask_command_works_without_torch(wheels: Path, tmp_path: Path) -> None:
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", python, "--no-index", "--find-links", wheels, "vime-devices")
    command = tmp_path / "env/bin/vime-devices"
    assert (
        run(command, "mask", "--platform", "hip", "--own", "3", "--node", "0-7", cwd=tmp_path).strip()
        == "3,0,1,2,4,5,6,7"
    )


def exclude_newer() -> str:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(settings["tool"]["uv"]["exclude-newer"])


def override(folder: Path) -> Path:
    """The workspace's own pins, so that the wheels' ranges are tried at the versions that were tested."""
    import tomllib

    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    path = folder / "override.txt"
    path.write_text("\n".join(uv["override-dependencies"] + uv["constraint-dependencies"]) + "\n", encoding="utf-8")
    return path
