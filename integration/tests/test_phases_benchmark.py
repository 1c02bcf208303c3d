"""What the benchmark makes of a run: medians without the first step, shares of the step, and whole curves."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from integration_support import EXAMPLES, config_file
from typer import Typer
from typer.testing import CliRunner
from vime_grpo import MetricsWriter, load_config, save_config

SECONDS = {"offload": 0.5, "rollout": 2.0, "train": 4.0, "log_probs": 1.0, "actor_train": 2.5, "update_weights": 0.3}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of three steps, the first of which is slow."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(load_config(config_file(tmp_path, steps=3, save_every=0)), folder / "config.toml")
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step, slow in ((1, 100.0), (2, 1.0), (3, 1.2)):
            times = {f"perf/{name}_time": slow * value for name, value in SECONDS.items()}
            row = {"rollout/raw_reward": step / 10, "rollout/response_lengths": 4.0, "rollout/samples": 256.0}
            rates = {"perf/tokens_per_gpu_per_sec": 512.0, "perf/actor_train_tok_per_s": 2000.0}
            writer.write(step, times | row | rates | {"perf/step_time": slow * 8.0})
    spans = [
        (1, "rollout", 50.0, 61.0),
        (1, "train", 61.0, 150.0),
        (2, "rollout", 151.0, 153.0),
        (3, "train", 155.0, 168.4),
    ]
    lines = [json.dumps({"step": step, "phase": name, "begin": b, "end": e}) for step, name, b, e in spans]
    (folder / "phases.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_first_step_counts_in_curves_and_not_in_medians(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    monkeypatch.delitem(sys.modules, "phases", raising=False)
    benchmark = import_module("phases")
    app = Typer()
    app.command()(benchmark.main)
    shown = CliRunner().invoke(app, [str(run_folder), "--out", str(run_folder / "phases.json")])
    assert shown.exit_code == 0, shown.output
    assert "| rollout | 2.200 |" in shown.output
    found = json.loads((run_folder / "phases.json").read_text())
    assert found["seconds"] == pytest.approx({name: 1.1 * value for name, value in SECONDS.items()} | {"step": 8.8})
    assert found["sync_and_moves_share"] == pytest.approx(0.8 / 8.0), "offload and update over the step"
    assert found["tokens_per_gpu_per_sec_of_the_step"] == pytest.approx(1024 / 8.8)
    assert found["curves"]["rollout/raw_reward"] == [0.1, 0.2, 0.3]
    assert found["mean"]["rollout/raw_reward"] == pytest.approx(0.2)
    assert found["step_ended_after_s"] == [100.0, 103.0, 118.4], "from the beginning of the first phase"
