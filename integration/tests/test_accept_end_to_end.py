"""The whole command on a CPU: real vLLM, Megatron-Core and Ray, a short run, and the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vime_integration.accept import STAGES, run_accept

#: All but the asynchronous run, which has tests of its own: a second start of an engine would double the time.
CHOSEN = [stage.name for stage in STAGES if stage.name != "grpo_async"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cpu_is_accepted(tmp_path: Path) -> None:
    out = tmp_path / "acceptance"
    code = run_accept("cpu", 0, out, steps=3, sync_mb=1, only=CHOSEN)
    manifest = json.loads((out / "manifest.json").read_text())
    failed = {s["name"]: s["reason"] for s in manifest["stages"] if s["outcome"] == "fail"}
    # A machine that is too small for the doctor may still run all of it: then that is what the manifest has to say.
    assert set(failed) <= {"doctor"}, failed
    assert code == (4 if failed else 0)
    outcomes = {stage["name"]: stage["outcome"] for stage in manifest["stages"]}
    assert outcomes | {"doctor": "pass"} == {
        "doctor": "pass",
        "mask_ab": "pass",
        "ipc_probe": "skip",
        "sync_bench": "pass",
        "grpo_colocated": "pass",
        "grpo_async": "skip",
        "logprob_difference": "pass",
        "throughput": "pass",
    }
    figures = {stage["name"]: stage["figures"] for stage in manifest["stages"]}
    assert figures["grpo_colocated"]["steps"] == 3
    assert figures["logprob_difference"]["colocated"]["steps"] == 3
    assert figures["throughput"]["colocated"]["perf/tokens_per_gpu_per_sec"] > 0
    assert (out / "runs/colocated/config.toml").is_file()
    assert "| grpo_colocated | pass |" in (out / "page.md").read_text()
