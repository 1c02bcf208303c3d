"""The house rules that a linter does not know: sizes, tracked files, and what the text may not name."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted([*(ROOT / "packages").iterdir(), ROOT / "integration"])
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_TRACKED_BYTES = 4 << 20


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=30)
    return [ROOT / name for name in names.stdout.split("\0") if name and (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def test_files_and_functions_stay_readable() -> None:
    long: list[str] = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_FILE_LINES:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
    assert not long, "longer than the house allows (500 lines a file, 60 a function):\n" + "\n".join(long)


def test_nothing_large_or_local_is_tracked() -> None:
    wrong = [
        f"{p.relative_to(ROOT)}: {p.stat().st_size} bytes" for p in tracked() if p.stat().st_size > MAX_TRACKED_BYTES
    ]
    forbidden = re.compile(r"uv\.lock$|\.whl$|__pycache__|\.egg-info/|^runs/")
    wrong += [str(p.relative_to(ROOT)) for p in tracked() if forbidden.search(str(p.relative_to(ROOT)))]
    assert not wrong, f"must not be tracked: {wrong}"


def test_no_tracked_text_names_this_checkout() -> None:
    # The checkout's own path is a path of the machine that runs the test; its parents may be anything, /tmp too.
    wrong = []
    for path in tracked():
        if path.suffix in {".safetensors", ".png"}:
            continue
        if f"{ROOT}/" in path.read_text(encoding="utf-8", errors="ignore"):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, f"these name {ROOT}: {wrong}"


def test_test_file_names_are_importable_anywhere() -> None:
    names = [path.name for path in python_files() if path.name.startswith("test_")]
    assert not [name for name in names if name.count(".") > 1], "a dot in a test file's name breaks its import"
    assert len(names) == len(set(names)), (
        f"two test files share a name: {sorted({n for n in names if names.count(n) > 1})}"
    )


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_member_is_complete(member: Path) -> None:
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests"):
        assert (member / name).exists(), f"{member.name} lacks {name}"
    settings = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))
    version = settings["project"]["version"]
    assert f"## {version}" in (member / "CHANGELOG.md").read_text(encoding="utf-8"), "the changelog lacks this version"
    assert settings["build-system"]["build-backend"] == "hatchling.build"
    assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
