"""A run in float16: its settings reach the trainer, and what the loss scale did stands in the metrics."""

from __future__ import annotations

from pathlib import Path

from integration_support import config_file
from vime_grpo import load_config
from vime_integration.actors.trainer import TrainReport, trainer_config
from vime_integration.metrics import DIFFERENCE, step_metrics
from vime_megatron import StepMetrics
from vime_sync import SyncReport

SYNC = SyncReport(1, 0.1, {}, 0, "", "off", "alias", "shm", 1)


def updates(**values: object) -> list[TrainReport]:
    sums = {"weight_sum": 1.0, "pg_loss": 0.5, DIFFERENCE.removeprefix("train/"): 1e-4}
    first = StepMetrics(0.5, 1.0, 1e-6, sums, tokens=10, seconds=1.0, step=1, **values)
    second = StepMetrics(0.5, 1.0, 1e-6, sums, tokens=10, seconds=1.0, step=2, **values)
    return [TrainReport((first, second), 1.0, {}, ())]


def test_the_settings_reach_the_trainer(tmp_path: Path) -> None:
    file = config_file(tmp_path, steps=1, save_every=0)
    asked = ["trainer.dtype=float16", "engine.dtype=float16"]
    dynamic = trainer_config(load_config(file, [*asked, "trainer.loss_scale_window=7"]))
    assert (dynamic.dtype, dynamic.optimizer.loss_scale, dynamic.optimizer.loss_scale_window) == (
        "float16",
        "dynamic",
        7,
    )
    fixed = trainer_config(load_config(file, [*asked, "trainer.loss_scale=1024"]))
    assert fixed.optimizer.loss_scale == 1024.0


def test_what_the_loss_scale_did_is_reported_and_only_in_float16() -> None:
    found = step_metrics(updates(loss_scale=2.0**14, redos=2), SYNC)
    assert (found["train/loss_scale"], found["train/loss_scale_redos"]) == (2.0**14, 4.0)
    assert not [name for name in step_metrics(updates(), SYNC) if "loss_scale" in name]
