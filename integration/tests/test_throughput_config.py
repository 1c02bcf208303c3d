"""The benchmark of the 8B shape fits into what it was written for, and its rewards make gradients."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from integration_support import pretend_8b
from vime_devices import Platform, child_environment
from vime_grpo import RunConfig, load_config
from vime_integration import disk
from vime_integration.budget import budget, refuse_misfits, settle
from vime_integration.disk import disk_need
from vime_integration.placement import place
from vime_rollout import Sample, load_reward
from vime_rollout.sample import SampleStatus, VersionSpan

GIB = 2**30
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
DEVICE = int(139.80 * GIB)  # of an H200, as its driver reports it


@pytest.fixture
def throughput(tmp_path: Path) -> RunConfig:
    """The benchmark, on a folder that is its model to whoever reads config.json."""
    folder = pretend_8b(tmp_path / "model")
    path = BENCHMARKS / "throughput_qwen3_8b.toml"
    return load_config(path, [f"model.path={folder}", f"pipeline.run_dir={tmp_path / 'run'}"])


def test_it_fits_into_two_gpus_and_moves_nothing(throughput: RunConfig) -> None:
    seats = place(throughput, Platform.CUDA, child_environment(Platform.CUDA, own=[0, 1], node=[0, 1], base={}).env)
    settled = settle(throughput, seats, DEVICE)
    assert settled.trainer.offload == "off"
    refuse_misfits(budget(settled, seats, DEVICE))


@pytest.mark.parametrize(("utilization", "chosen"), [(0.25, "off"), (0.4, "off"), (0.41, "on"), (0.6, "on")])
def test_a_phase_that_is_full_either_way_moves_no_state(throughput: RunConfig, utilization: float, chosen: str) -> None:
    """Moving state does not make training emptier; what it would make fuller has to have room to spare."""
    section = throughput.engine.model_copy(update={"gpu_memory_utilization": utilization, "kv_cache_gib": None})
    config = throughput.model_copy(update={"engine": section})
    seats = place(config, Platform.CUDA, child_environment(Platform.CUDA, own=[0, 1], node=[0, 1], base={}).env)
    settled = settle(config, seats, DEVICE)
    assert settled.trainer.offload == chosen
    found = {need.name: need for need in budget(settled, seats, DEVICE)}
    share = utilization * DEVICE / GIB
    assert found["train"].total / GIB == pytest.approx(102.74 + share, abs=0.01)
    assert found["rollout"].total / GIB == pytest.approx(share + (69.66 if chosen == "off" else 8.63), abs=0.01)


def test_it_fits_onto_a_disk_of_110_gb(throughput: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: SimpleNamespace(free=110 * 10**9))
    need = disk_need(throughput)
    assert need.fits
    assert need.checkpoint_bytes > 110 * 10**9 > need.total, "it writes the trained model, and no checkpoint"


def answered(*response: int) -> Sample:
    return Sample(
        prompt_id="p",
        group_id="g",
        index=0,
        tokens=(5, 6, *response),
        prompt_length=2,
        loss_mask=(1,) * len(response),
        logprobs=(0.0,) * len(response),
        versions=(VersionSpan(1, 0, len(response)),),
        status=SampleStatus.COMPLETED,
    )


def test_its_rewards_are_a_fair_coin_that_the_tokens_decide(
    throughput: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    reward = load_reward(throughput.reward.path or "", timeout_s=5.0, options={})

    async def scores() -> list[float]:
        return [(await reward.score(answered(first, 3))).value for first in range(400)]

    once = asyncio.run(scores())
    assert once == asyncio.run(scores())
    assert set(once) == {0.0, 1.0}
    assert 150 < sum(once) < 250
    groups = [once[start : start + 8] for start in range(0, 400, 8)]
    assert sum(len(set(group)) == 2 for group in groups) >= 45, "nearly every group has something to learn from"
