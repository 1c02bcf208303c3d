"""No other code of the repository reads or writes a visibility mask."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MASK = re.compile(r"(?:HIP|CUDA|ROCR)_VISIBLE_DEVICES")


def tracked_sources():
    if not (ROOT / "integration").is_dir() or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of the whole repository (an sdist of this package alone)")
    listing = subprocess.run(
        ["git", "ls-files", "packages", "integration", "tools"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [Path(line) for line in listing.stdout.splitlines() if line.endswith(".py")]
    return [p for p in paths if "tests" not in p.parts and p.parts[:2] != ("packages", "vime-devices")]


def test_masks_are_mentioned_in_vime_devices_alone():
    sources = tracked_sources()
    assert sources
    found = [
        f"{path}:{number}"
        for path in sources
        if (ROOT / path).is_file()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if MASK.search(line)
    ]
    assert not found, f"take masks from vime_devices (child_environment, ray_environment) instead: {found}"
