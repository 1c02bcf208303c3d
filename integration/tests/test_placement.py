"""Every process of a colocated run gets its devices, its mask and its threads; on HIP a mask is never shrunk."""

from __future__ import annotations

import pytest
from vime_devices import Platform
from vime_grpo.config import RunConfig, config_from_dict
from vime_integration.errors import PlacementError
from vime_integration.placement import Placement, place


def config(*, ranks: int = 1, engines: int = 1, size: int = 1, threads: int = 0) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": "/models/any"},
            "data": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8},
            "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_response_tokens": 8, "max_context_tokens": 64},
            "engine": {"count": engines, "tensor_parallel": size, "threads": threads},
            "reward": {"name": "reasoning_gym"},
            "algorithm": {},
            "trainer": {"data_parallel": ranks},
            "sync": {},
            "pipeline": {"steps": 1, "run_dir": "/runs/any"},
            "checkpoint": {},
            "tracking": {},
        }
    )


def masks(placement: Placement) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(seat.name, seat.mask, seat.local_indices) for seat in (*placement.trainers, *placement.engines)]


NODE = {"HIP_VISIBLE_DEVICES": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_hip_lists_own_devices_first_and_then_the_rest_of_the_node() -> None:
    placement = place(config(ranks=4, engines=4), Platform.HIP, NODE)
    orders = ["0,1,2,3", "1,0,2,3", "2,0,1,3", "3,0,1,2"]
    expected = [(f"{role}-{i}", order, (0,)) for role in ("trainer", "engine") for i, order in enumerate(orders)]
    assert masks(placement) == expected
    third = placement.engines[3].environment
    assert third == {"HIP_VISIBLE_DEVICES": "3,0,1,2", "CUDA_VISIBLE_DEVICES": "3,0,1,2"}


def test_cuda_shows_own_devices_only() -> None:
    placement = place(config(ranks=2, engines=2, size=2), Platform.CUDA, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert masks(placement) == [
        ("trainer-0", "4", (0,)),
        ("trainer-1", "5", (0,)),
        ("engine-0", "4,5", (0, 1)),
        ("engine-1", "6,7", (0, 1)),
    ]


def test_a_rocr_mask_of_the_launcher_is_removed_from_its_children() -> None:
    placement = place(config(ranks=2, engines=2), Platform.HIP, {"ROCR_VISIBLE_DEVICES": "4,5"})
    seat = placement.engines[1]
    assert seat.mask == "5,4"
    assert seat.removed == ("ROCR_VISIBLE_DEVICES",)


def test_too_few_devices_is_said_before_anything_starts() -> None:
    with pytest.raises(PlacementError) as caught:
        place(config(ranks=8, engines=2), Platform.CUDA, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "2 visible" in caught.value.seen
    assert "8 trainer ranks" in caught.value.expected


def test_a_cpu_has_threads_instead_of_devices() -> None:
    placement = place(config(ranks=2, engines=2, threads=3), Platform.CPU, {"PATH": "/bin"})
    assert {seat.mask for seat in (*placement.trainers, *placement.engines)} == {""}
    assert {seat.threads for seat in placement.engines} == {3}
    assert all(seat.threads >= 1 for seat in placement.trainers)
    assert all(not seat.environment and not seat.removed for seat in placement.trainers)
    assert placement.describe()[-1] == "engine-1: 3 threads"
