"""Install a wheel alone, outside the workspace, and try its door and its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from releasing.members import Member, ReleaseError

DEADLINE_S = 900

PROBE = """
import importlib, json, pathlib, sys
from importlib import metadata
name, module = json.loads(sys.argv[1])
door = importlib.import_module(module)
scripts = [point.name for point in metadata.distribution(name).entry_points if point.group == "console_scripts"]
print(json.dumps({
    "version": metadata.version(name),
    "inside": str(pathlib.Path(door.__file__)).startswith(sys.prefix),
    "missing": [item for item in getattr(door, "__all__", []) if not hasattr(door, item)],
    "scripts": scripts,
}))
"""


def smoke(root: Path, member: Member, version: str, wheel: Path, siblings: Path) -> list[str]:
    """Install a wheel into a fresh environment and use it a little.

    Args:
        root: The workspace, for its pins: the release is tried at the versions that were tested.
        member: What the wheel holds.
        version: Its version.
        wheel: The file.
        siblings: Folder with wheels of the other members, which an index may not have yet.

    Returns:
        What was tried.

    Raises:
        ReleaseError: A step failed.
    """
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        python = folder / "env" / "bin" / "python"
        _run([uv, "venv", "--quiet", "--python", sys.executable, folder / "env"], folder)
        options: list[str | Path] = ["--quiet", "--python", python, "--find-links", siblings, *_pins(root, folder)]
        _run([uv, "pip", "install", *options, wheel], folder)
        seen = json.loads(_run([python, "-P", "-c", PROBE, json.dumps([member.name, member.module])], folder))
        if seen["version"] != version or not seen["inside"] or seen["missing"]:
            raise ReleaseError(
                f"{member.name} installed alone is version {seen['version']}, inside its environment: "
                f"{seen['inside']}, names missing from its door: {seen['missing']}; expected {version}, True, none"
            )
        for script in seen["scripts"]:
            _run([folder / "env" / "bin" / script, "--help"], folder)
    return [f"import {member.module}", *(f"{script} --help" for script in seen["scripts"])]


def _pins(root: Path, folder: Path) -> list[str | Path]:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    pins = [*settings.get("override-dependencies", []), *settings.get("constraint-dependencies", [])]
    override = folder / "override.txt"
    override.write_text("\n".join(pins) + "\n", encoding="utf-8")
    newest = settings.get("exclude-newer")
    return ["--override", override, *(["--exclude-newer", newest] if newest else [])]


def _run(command: list[str | Path], folder: Path) -> str:
    # The environment of whoever releases must not help: no activated environment, no path, none of uv's project.
    env = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT"}}
    text = [str(part) for part in command]
    try:
        done = subprocess.run(text, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    except subprocess.CalledProcessError as error:
        raise ReleaseError(f"`{' '.join(text[:4])} ...` failed: {error.stderr.strip()[-800:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"`{' '.join(text[:4])} ...` did not end within {DEADLINE_S} s") from error
    return done.stdout
