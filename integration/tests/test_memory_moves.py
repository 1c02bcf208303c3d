"""Memory that was not returned ends the run with the figures; what engines share is decided before they start."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_support import config_file
from vime_devices import Platform
from vime_grpo import load_config
from vime_grpo.config import RunConfig, config_from_dict
from vime_integration.actors.trainer import TrainerActor, trainer_config
from vime_integration.errors import PipelineError, PlacementError
from vime_integration.memory import moved_metrics, slept_metrics
from vime_integration.placement import place
from vime_integration.sharing import choose, makes_room, offloads, sleeps
from vime_integration.translate import head_arguments
from vime_megatron import MegatronTrainer
from vime_sync.errors import AliasError

GIB = 2**30
NODE = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def config(**sections) -> RunConfig:
    base = {
        "model": {"path": "/models/any"},
        "data": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8},
        "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_response_tokens": 8, "max_context_tokens": 64},
        "engine": {},
        "reward": {"name": "reasoning_gym"},
        "algorithm": {},
        "trainer": {},
        "sync": {},
        "pipeline": {"steps": 1, "run_dir": "/runs/any"},
        "checkpoint": {},
        "tracking": {},
    }
    return config_from_dict({name: {**base[name], **sections.get(name, {})} for name in base})


def test_an_offload_that_returns_its_memory_is_measured() -> None:
    report = {"bytes_copied": 8 * GIB, "bytes_dropped": 4 * GIB, "device_bytes": 12 * GIB}
    assert moved_metrics("offload", [report]) == {"memory/offload_gib": 12.0, "memory/offload_device_gib": 12.0}
    kept = [{**report, "bytes_copied": 0, "bytes_dropped": 0, "device_bytes": 0, "kept_gib": gib} for gib in (70, 71)]
    assert moved_metrics("offload", kept) == {"memory/offload_gib": 0.0, "memory/trainer_kept_gib": 71}
    assert moved_metrics("offload", [{}, kept[0]]) == {"memory/offload_gib": 0.0, "memory/trainer_kept_gib": 70}
    assert moved_metrics("offload", [{}, {}]) == {}, "there was room on every rank"
    on_a_cpu = {**report, "device_bytes": 0}
    assert moved_metrics("offload", [on_a_cpu]) == {"memory/offload_gib": 12.0}


def test_state_leaves_once_and_only_where_asked_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = load_config(config_file(tmp_path, steps=1, save_every=0))
    actor = TrainerActor.__new__(TrainerActor)  # without the process around it, whose log goes to a file
    actor._gave_room = False
    actor._trainer = MegatronTrainer(trainer_config(asked), rank=0, world_size=1, init_method=None, device_index=0)
    try:
        made = [actor.make_room(offload) for offload in (False, True, True, False)]
        assert [report["what"] for report in made] == [(), ("gradients", "optimizer"), (), ()]
        assert all(report["kept_gib"] == 0 for report in made), "a CPU has no allocator that keeps"
        assert actor.take_room()["what"] == ("gradients", "optimizer")
        assert actor.make_room(False)["what"] == actor.take_room()["what"] == ()
        memory = actor._trainer.memory()
        for free, done in ((7.9, True), (8.0, False)):
            monkeypatch.setattr(actor._trainer, "memory", lambda free=free: {**memory, "device_free_gib": free})
            assert bool(actor.make_room(False)) is done, "nothing is emptied where there is room enough"
        assert actor.make_room(False, enough_gib=float("inf")), "before engines start it always is"
        assert actor.make_room(True)["what"] == ("gradients", "optimizer"), "what was asked to leave leaves"
    finally:
        actor._trainer.close()


def test_an_offload_that_keeps_its_memory_ends_the_run_with_the_figures() -> None:
    whole = {"bytes_copied": 8 * GIB, "bytes_dropped": 0, "device_bytes": 8 * GIB}
    kept = {**whole, "device_bytes": GIB}
    with pytest.raises(PipelineError, match=r"trainer-1.*1\.00 GiB more free.*6\.95 GiB, of 8\.00 GiB moved"):
        moved_metrics("offload", [whole, kept])


def test_an_engine_that_sleeps_and_keeps_its_memory_is_found() -> None:
    assert slept_metrics([{"device_free_gib": 10.0}], [{"device_free_gib": 60.5}]) == {"memory/engines_slept_gib": 50.5}
    assert slept_metrics([{}], [{}]) == {}
    with pytest.raises(PipelineError, match=r"kept its memory.*trainer-0"):
        slept_metrics([{"device_free_gib": 10.0}], [{"device_free_gib": 10.0}])


def test_both_sides_have_float32_logits_unless_told_otherwise() -> None:
    half = {"dtype": "bfloat16"}
    assert head_arguments(config(engine=half)) == ["--hf-overrides", '{"head_dtype": "float32"}']
    assert head_arguments(config(engine={"dtype": "float32"})) == [], "they are float32 anyway"
    models_own = config(engine=half, model={"path": "/models/any", "head_dtype": "model"})
    assert head_arguments(models_own) == []
    assert trainer_config(config(engine=half)).head_dtype == "float32"
    assert trainer_config(models_own).head_dtype == "model"


def test_colocated_engines_on_gpus_run_on_the_trainers_weights_and_the_trainer_makes_room() -> None:
    asked = config(trainer={"tensor_parallel": 2}, engine={"tensor_parallel": 2})
    placement = place(asked, Platform.CUDA, NODE)
    choice = choose(asked, placement)
    assert (choice.transport, choice.mode, choice.weights) == ("ipc", "alias", "auto")
    assert offloads(asked, placement)
    assert not sleeps(asked, placement)


def test_every_engine_runs_on_the_replica_of_its_own_devices() -> None:
    asked = config(trainer={"data_parallel": 2}, engine={"count": 2})
    assert choose(asked, place(asked, Platform.CUDA, NODE)).mode == "alias"


def test_engines_that_sleep_have_weights_of_their_own() -> None:
    asked = config(engine={"sleep": "on"})
    placement = place(asked, Platform.CUDA, NODE)
    choice = choose(asked, placement)
    assert choice.mode == "copy"
    assert any("sleep" in reason for reason in choice.alias_refused)
    assert sleeps(asked, placement)


def test_the_trainer_makes_room_wherever_an_engine_of_the_run_sits_on_its_device() -> None:
    def asked(platform: Platform, **sections) -> bool:
        return makes_room(config(**sections), place(config(**sections), platform, NODE))

    assert asked(Platform.CUDA, trainer={"offload": "off"}), "its allocator's cache, if nothing else"
    assert asked(Platform.CUDA, trainer={"offload": "on"})
    assert not asked(Platform.CUDA, pipeline={"mode": "async"}), "devices of its own"
    assert not asked(Platform.CPU)
    foreign = {"count": 0, "urls": ["http://127.0.0.1:9"]}
    assert not asked(Platform.CUDA, trainer={"offload": "off"}, engine=foreign)


def test_asynchronous_engines_copy() -> None:
    asked = config(pipeline={"mode": "async"})
    placement = place(asked, Platform.CUDA, NODE)
    assert choose(asked, placement).mode == "copy"
    assert not offloads(asked, placement)
    with pytest.raises(PlacementError, match="asynchronous engines cannot run on the trainer's memory"):
        choose(config(pipeline={"mode": "async"}, sync={"mode": "alias"}), placement)


def test_alias_that_cannot_be_is_refused_with_the_reason() -> None:
    asked = config(engine={"count": 2}, sync={"mode": "alias"})  # the second engine's device has no trainer rank
    with pytest.raises(AliasError, match="other devices than the trainer's weights"):
        choose(asked, place(asked, Platform.CUDA, NODE))


def test_on_a_cpu_weights_are_copied_unless_asked_otherwise() -> None:
    placement = place(config(), Platform.CPU, {})
    assert choose(config(), placement).weights == "dummy"
    assert choose(config(sync={"mode": "alias"}), placement).weights == "alias"
