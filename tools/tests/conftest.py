"""The path on which the tools and the helpers of their tests are found, and the fixture that both image suites use."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# The programs find their siblings in their own folder; tests that call their functions need the same path.
sys.path[:0] = [str(TESTS.parent / "image"), str(TESTS.parent), str(TESTS)]

from image_world import FakeEnvironment  # noqa: E402


@pytest.fixture
def fake_environment(tmp_path: Path) -> FakeEnvironment:
    """A virtual environment without pip whose site folder a test fills by hand."""
    venv.create(tmp_path / "fake", with_pip=False, symlinks=True)
    return FakeEnvironment(tmp_path / "fake")
