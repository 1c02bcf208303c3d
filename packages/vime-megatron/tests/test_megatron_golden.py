"""Twenty losses of each family stay what they were when they were recorded, on each platform that has a record.

A platform is the CPU or a GPU architecture (``sm90``, ``gfx942``), with a file each under ``golden/`` that says which
versions made it. The tolerance is relative:

* float32: 1e-4, since releases differ by the order of sums in the matrix library. A GPU's losses are held against the
  CPU's record too: the two start from the same weights, and on an H200 they were 3e-7 apart.
* bfloat16, the type of real runs, on a GPU only, with the fused kernels: 1e-2, since a rounding that falls the other
  way is 0.4% of a value and the steps carry it on. (Two runs on one H200 agreed to the bit.)
* float16 has no record of its own: it is near enough to be held against the CPU's in float32. The dense families were
  3e-4 from it on a CPU, and the experts, where a rounding may choose another one, 6e-3.

Set ``VIME_WRITE_GOLDEN=1`` to record anew, after a change that means to move the losses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from vime_megatron import sft_loss

GOLDEN = Path(__file__).parent / "golden"
STEPS = 20
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}
FROM_FLOAT32 = {"llama": 2e-3, "qwen2": 2e-3, "qwen3": 2e-3, "qwen3-moe": 3e-2}
KINDS = ["llama", "qwen2", "qwen3", "qwen3-moe"]
SETTINGS = {"lr": 2e-3, "warmup_steps": 3, "weight_decay": 0.01}
on_gpu = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs an NVIDIA or AMD GPU")


def platform() -> str:
    """Name what the record depends on."""
    if torch.cuda.device_count() == 0:
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(0))


def losses_of(trainer, batch_of) -> list[float]:
    return [trainer.step(batch_of(seed=step % 4), sft_loss).loss for step in range(STEPS)]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_float16_are_those_of_float32(make_trainer, model_of, batch_of, kind):
    losses = losses_of(make_trainer(model_of(kind), optimizer=SETTINGS, dtype="float16"), batch_of)
    _compare(losses, _recorded("cpu", kind), FROM_FLOAT32[kind])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in KINDS),
        *(pytest.param(kind, "bfloat16", marks=[pytest.mark.gpu, on_gpu]) for kind in KINDS),
    ],
)
def test_losses_are_those_of_the_record(make_trainer, model_of, batch_of, kind, dtype):
    losses = losses_of(make_trainer(model_of(kind), optimizer=SETTINGS, dtype=dtype), batch_of)
    case = kind if dtype == "float32" else f"{kind}, {dtype}"
    if os.environ.get("VIME_WRITE_GOLDEN"):
        _write(case, losses)
    if platform() != "cpu" and dtype == "float32":
        _compare(losses, _recorded("cpu", case), TOLERANCES[dtype])
    if not (GOLDEN / f"{platform()}.json").is_file():
        pytest.skip(f"no losses have been recorded on {platform()} yet: VIME_WRITE_GOLDEN=1 records them")
    _compare(losses, _recorded(platform(), case), TOLERANCES[dtype])


def _recorded(name: str, case: str) -> list[float]:
    return json.loads((GOLDEN / f"{name}.json").read_text())["losses"][case]


def _compare(losses: list[float], recorded: list[float], tolerance: float) -> None:
    assert len(recorded) == STEPS
    assert recorded[-1] < 0.9 * recorded[0]
    assert losses == pytest.approx(recorded, rel=tolerance)


def _write(case: str, losses: list[float]) -> None:
    import megatron.core

    path = GOLDEN / f"{platform()}.json"
    record = json.loads(path.read_text()) if path.is_file() else {"losses": {}}
    versions = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
    record["made_with"] = versions | ({"gpu": torch.cuda.get_device_name(0)} if platform() != "cpu" else {})
    record["losses"][case] = losses
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
