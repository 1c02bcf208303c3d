"""Twenty losses of each family stay what they were when they were recorded, on each platform that has a record.

The record says which versions made it. Its tolerance is relative: 1e-4 on the CPU in float32, where runs differ by the
order of sums in the matrix library. Set ``VIME_WRITE_GOLDEN=1`` to record anew, after a change that means to move them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from vime_megatron import sft_loss

RECORD = Path(__file__).parent / "golden" / "cpu.json"
STEPS = 20
TOLERANCE = 1e-4
KINDS = ["llama", "qwen2", "qwen3", "qwen3-moe"]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the record is of the CPU, which cannot be chosen by a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_record(make_trainer, model_of, batch_of, kind):
    trainer = make_trainer(model_of(kind), optimizer={"lr": 2e-3, "warmup_steps": 3, "weight_decay": 0.01})
    losses = [trainer.step(batch_of(seed=step % 4), sft_loss).loss for step in range(STEPS)]
    if os.environ.get("VIME_WRITE_GOLDEN"):
        _write(kind, losses)
    recorded = json.loads(RECORD.read_text())["losses"][kind]
    assert len(recorded) == STEPS
    assert recorded[-1] < 0.9 * recorded[0]
    assert losses == pytest.approx(recorded, rel=TOLERANCE)


def _write(kind: str, losses: list[float]) -> None:
    import megatron.core

    RECORD.parent.mkdir(exist_ok=True)
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"losses": {}}
    record["made_with"] = {"torch": torch.__version__, "megatron-core": megatron.core.__version__, "dtype": "float32"}
    record["losses"][kind] = losses
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
