"""Real engines of owners that are processes of their own: one that is killed, and the example of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def line_of(process):
    """Return a process's command line, or nothing where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_nothing_is_left_when_the_owner_is_killed(tiny_model, tmp_path):
    owner = f"""
        import asyncio
        from vime_rollout import CpuOptions, EngineConfig, VLLMEngine
        config = EngineConfig(model={str(tiny_model)!r}, dtype="float32", enforce_eager=True, cpu=CpuOptions(),
                              log_path={str(tmp_path / "engine.log")!r})
        asyncio.run(VLLMEngine(config).start())
    """
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # pytest's own has too long a path for vLLM's sockets
        environment = os.environ | {"TMPDIR": temporary}
        parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(owner)], env=environment)
        tree: list[psutil.Process] = []
        deadline = time.monotonic() + 120
        while not (sockets(temporary) and any("EngineCore" in line_of(p) or "spawn_main" in line_of(p) for p in tree)):
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.2)
            tree = [p for p in psutil.Process(parent.pid).children(recursive=True) if p.is_running()]
        parent.kill()
        parent.wait(10)
        _, alive = psutil.wait_procs(tree, timeout=20)
        assert alive == []
        assert [p for p in Path(temporary).iterdir() if not p.name.startswith("torchinductor_")] == []  # a cache stays


def sockets(folder):
    """Return the unix sockets below a folder."""
    return [path for path in Path(folder).rglob("*") if path.is_socket()]


def test_the_example_of_the_readme_runs(tiny_model, tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "example.py").write_text(example.replace("path/to/model", str(tiny_model)))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:] + (tmp_path / "engine-0.log").read_text()[-20000:]
    assert "rollout/raw_reward" in done.stdout
