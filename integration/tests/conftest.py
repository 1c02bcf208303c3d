"""Fixtures of the integration tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The helpers are a plain module beside the tests, which import mode importlib does not find by itself.
sys.path.insert(0, str(Path(__file__).parent))

from integration_support import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start `vime-grpo train ...`; whatever is left at the end of the test is killed."""
    started: list[Launch] = []

    def start(*arguments: str) -> Launch:
        run = Launch(*arguments, output=tmp_path / f"launch-{len(started)}.txt")
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill_all()
