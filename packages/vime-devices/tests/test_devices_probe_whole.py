"""The whole probe, worker and all, over a stand-in for torch (see its docstring)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vime_devices import Platform
from vime_devices.probe import ProbeOptions, run_probe

SOURCE = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture
def environ(tmp_path):
    memory, site = tmp_path / "memory", tmp_path / "site"
    memory.mkdir()
    site.mkdir()
    shutil.copy(Path(__file__).with_name("torch_stand_in.py"), site / "torch.py")
    paths = os.pathsep.join([str(site), str(SOURCE)])
    return {"PATH": os.defpath, "PYTHONPATH": paths, "STAND_IN_MEMORY": str(memory)}


def test_the_default_matrix(environ):
    result = run_probe(Platform.CUDA, environ, ProbeOptions(jobs=2, start_s=60, open_s=60))
    assert (result.torch, result.runtime, len(result.devices)) == ("stand-in", "CUDA stand-in", 2)
    found = {(c.mask, c.exported, c.arm.value): (c.outcome.value, c.denotes, c.text) for c in result.cases}
    assert len(found) == 32
    for prefix in ("", "uuid:"):
        assert found[f"{prefix}0", 1, "exported"] == ("refused", "", "CUDA error: invalid device ordinal")
        assert found[f"{prefix}0", 1, "own"] == ("ok", "other", "")
        assert found[f"{prefix}1", 1, "own"] == ("ok", "same", "")
        assert found[f"{prefix}1,0", 0, "exported"] == ("ok", "other", "")
        assert found[f"{prefix}0,1", 1, "exported"] == ("ok", "same", "")


def test_the_command_needs_nothing_but_the_path(environ):
    done = subprocess.run(
        [sys.executable, "-S", "-m", "vime_devices.cli", "probe-ipc", "--platform", "cuda", "--masks", "1", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [(c["exported"], c["arm"], c["outcome"]) for c in json.loads(done.stdout)["cases"]]
    assert outcomes == [(0, "exported", "ok"), (0, "own", "ok"), (1, "exported", "refused"), (1, "own", "ok")]


def test_an_exporter_that_refuses(environ):
    code = "import sys; from vime_devices.probe.worker import main; sys.exit(main(['export']))"
    request = json.dumps({"number": 0, "ordinal": 5, "nonce": "00" * 32, "size": 64}) + "\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, input=request, capture_output=True, text=True, timeout=60
    )
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready["event"] == "ready"
    assert answer == {"event": "refused", "number": 0, "text": "CUDA error: invalid device ordinal"}
    assert "chats on standard output" in done.stderr
