"""A phase that does not fit is named before anything starts, with who takes what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integration_support import EXAMPLES, pretend_8b
from vime_devices import Platform, child_environment
from vime_grpo import RunConfig, load_config
from vime_integration.budget import budget, check_budget, refuse_misfits, settle, sharing_of, trainer_plan
from vime_integration.device_memory import DeviceMemory
from vime_integration.disk import bundle_bytes
from vime_integration.doctor import Machine, Status
from vime_integration.doctor.configuration import check_configuration
from vime_integration.errors import PlacementError
from vime_integration.needs import (
    PhaseNeed,
    Sharing,
    engine_weights,
    gpu_needs,
    kv_bytes_per_token,
)
from vime_integration.placement import place
from vime_megatron import check_model

GIB = 2**30
SETTINGS = (
    "trainer.dtype=bfloat16",
    "engine.dtype=bfloat16",
    "trainer.max_tokens_per_microbatch=8192",
    "rollout.max_response_tokens=4096",
    "rollout.max_context_tokens=8192",
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is Qwen3-8B to whoever reads its config.json."""
    return pretend_8b(tmp_path_factory.mktemp("large") / "model")


def configured(model: Path, *overrides: str) -> RunConfig:
    """The demo with a large model and, where nothing else is said, an engine that takes its whole share."""
    run = model.parent / "run"
    config = load_config(
        EXAMPLES / "demo_cpu.toml", [f"model.path={model}", f"pipeline.run_dir={run}", *SETTINGS, *overrides]
    )
    if any("kv_cache_gib" in text for text in overrides):
        return config
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kv_cache_gib": None})})


def on_gpus(config: RunConfig, count: int, gib: int) -> dict[str, tuple[Status, str]]:
    devices = tuple(DeviceMemory("made up", "sm_90", gib * GIB, gib * GIB) for _ in range(count))
    masked = child_environment(Platform.CUDA, own=range(count), node=range(count), base={})
    there = Machine(Platform.CUDA, devices, 256 * GIB, 64 * GIB, masked.env)
    return {check.name: (check.status, check.line()) for check in check_configuration(config, there)}


def test_an_eight_billion_model_does_not_train_on_one_gpu_and_the_phase_is_named(large: Path) -> None:
    found = on_gpus(configured(large), 1, 141)
    status, line = found["config.memory.train"]
    assert status is Status.FAIL
    assert "trainer" in line
    assert "trainer.tensor_parallel" in line


def phases(config: RunConfig, sleeps: bool, offloads: bool, aliased: bool = False) -> dict[str, PhaseNeed]:
    shape = check_model(config.model.path)
    needs = gpu_needs(config, trainer_plan(config), shape, 192 * GIB, Sharing(sleeps, offloads, aliased))
    return {need.name: need for need in needs}


def test_who_gives_back_decides_which_phase_fits(large: Path) -> None:
    config = configured(large)
    giving, keeping = phases(config, sleeps=True, offloads=True), phases(config, sleeps=False, offloads=False)
    assert giving["rollout"].fits
    assert not keeping["rollout"].fits
    assert all(giving[name].total < keeping[name].total for name in ("rollout", "train", "update_weights"))
    aliased = phases(config, sleeps=False, offloads=True, aliased=True)
    assert aliased["engine"].parts["weights"] == 0, "the engine runs on the trainer's weights"
    assert aliased["rollout"].parts == giving["rollout"].parts, "which the trainer keeps in any case"


def test_the_pipeline_itself_decides_who_gives_back(large: Path) -> None:
    masked = child_environment(Platform.CUDA, own=[0], node=[0], base={})

    def decided(*overrides: str) -> Sharing:
        config = configured(large, *overrides)
        return sharing_of(config, place(config, Platform.CUDA, masked.env))

    assert decided() == Sharing(sleeps=False, offloads=True, aliased=True)
    assert decided("engine.sleep=on", "sync.mode=copy") == Sharing(sleeps=True, offloads=True, aliased=False)
    assert not decided("trainer.offload=off").offloads
    together = decided("pipeline.mode=async", "pipeline.pools=shared")
    assert together == Sharing(sleeps=False, offloads=False, aliased=False), "both work all the time"


def test_state_leaves_the_device_only_where_there_is_no_room_for_both(large: Path) -> None:
    config = configured(large)
    seats = place(config, Platform.CUDA, child_environment(Platform.CUDA, own=[0], node=[0], base={}).env)
    roomy, narrow = settle(config, seats, 800 * GIB), settle(config, seats, 400 * GIB)
    assert (roomy.trainer.offload, narrow.trainer.offload) == ("off", "on")
    for chosen in ("on", "off"):
        own = configured(large, f"trainer.offload={chosen}")
        assert settle(own, seats, 800 * GIB).trainer.offload == chosen, "what was chosen stays"
    together = configured(large, "pipeline.mode=async", "pipeline.pools=shared")
    assert settle(together, seats, 400 * GIB) == together, "it trains while engines generate"


def test_a_cache_of_a_chosen_size_takes_less_than_the_share_and_holds_one_context(large: Path) -> None:
    plain, bounded = (
        phases(configured(large), False, False),
        phases(configured(large, "engine.kv_cache_gib=8"), False, False),
    )
    assert bounded["engine"].budget == plain["engine"].budget
    assert bounded["engine"].parts["KV cache"] == 8 * GIB
    assert bounded["rollout"].parts["engine's share"] == bounded["engine"].total < plain["engine"].budget
    assert bounded["train"].total < plain["train"].total
    assert bounded["engine cache"].fits
    small = phases(configured(large, "engine.kv_cache_gib=1"), False, False)
    assert not small["engine cache"].fits, "8,192 tokens of this model take 1.1 GiB"
    beyond = phases(configured(large, "engine.kv_cache_gib=112"), False, False)
    assert not beyond["engine"].fits, "vLLM itself would not keep to the share then"


def test_engines_of_somebody_else_take_nothing_of_the_trainers_devices(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = configured(large, "engine.count=0", "engine.urls=['http://127.0.0.1:9']")
    seats = place(foreign, Platform.CUDA, child_environment(Platform.CUDA, own=[0], node=[0], base={}).env)
    (only,) = budget(foreign, seats, 400 * GIB)
    assert (only.name, list(only.parts)) == ("train", ["trainer"])
    monkeypatch.setattr("vime_integration.budget.ask_memory", lambda: [DeviceMemory("made up", "sm_90", 0, 400 * GIB)])
    assert check_budget(foreign, seats).trainer.offload == "off", "there is nobody to make room for"
    monkeypatch.setattr("vime_integration.budget.ask_memory", lambda: [DeviceMemory("made up", "sm_90", 0, 24 * GIB)])
    with pytest.raises(PlacementError, match="train: trainer"):
        check_budget(foreign, seats)


def test_a_run_that_does_not_fit_is_refused_before_it_starts(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(large)
    seats = place(config, Platform.CUDA, child_environment(Platform.CUDA, own=[0], node=[0], base={}).env)
    with pytest.raises(PlacementError) as caught:
        refuse_misfits(budget(config, seats, 141 * GIB))
    text = str(caught.value)
    assert "train: trainer" in text, "the phase and who holds what"
    assert "trainer.tensor_parallel" in text, "what to do"
    refuse_misfits(budget(config, seats, 640 * GIB))
    monkeypatch.setattr("vime_integration.budget.ask_memory", lambda: [DeviceMemory("made up", "sm_90", 0, 141 * GIB)])
    with pytest.raises(PlacementError, match="memory_check"):
        check_budget(config, seats)
    nevertheless = configured(large, "pipeline.memory_check=warn")
    assert check_budget(nevertheless, seats).trainer.offload == "on"


def test_an_engine_whose_share_cannot_hold_its_model_is_named(large: Path) -> None:
    found = on_gpus(configured(large, "engine.gpu_memory_utilization=0.1", "sync.mode=copy"), 1, 141)
    assert found["config.memory.engine"][0] is Status.FAIL
    assert "one context of KV cache" in found["config.memory.engine"][1]


def test_too_few_devices_are_counted_by_the_mode(large: Path) -> None:
    both = configured(large, "engine.count=2", "trainer.data_parallel=2")
    assert on_gpus(both, 2, 141)["config.placement"][0] is Status.OK
    assert on_gpus(both, 1, 141)["config.placement"][0] is Status.FAIL
    apart = configured(large, "engine.count=2", "trainer.data_parallel=2", "pipeline.mode=async")
    status, line = on_gpus(apart, 3, 141)["config.placement"]
    assert status is Status.FAIL
    assert "4" in line
    assert "config.memory.rollout" not in on_gpus(apart, 4, 141), "disjoint pools share no memory"
    together = configured(large, "pipeline.mode=async", "pipeline.pools=shared")
    assert on_gpus(together, 1, 141)["config.placement"][0] is Status.OK
    assert "engine keeps" in on_gpus(together, 1, 141)["config.memory.train"][1], "shared pools share it"


def test_a_cpu_run_is_one_sum(large: Path) -> None:
    small = Machine(Platform.CPU, (), 24 * GIB, 8 * GIB)
    found = {check.name: check for check in check_configuration(configured(large), small)}
    assert found["config.memory.all-phases"].status is Status.FAIL
    assert "processes" in found["config.memory.all-phases"].seen


def test_no_answer_from_the_devices_is_a_failure_and_not_a_pass(large: Path) -> None:
    nothing = Machine(Platform.CUDA, (), 24 * GIB, 8 * GIB, {})
    found = {check.name: check for check in check_configuration(configured(large), nothing)}
    assert found["config.memory"].status is Status.FAIL


def test_figures_of_a_known_model(large: Path) -> None:
    shape, config = check_model(large), configured(large)
    # 2 (key, value) x 36 layers x 8 heads x 128 x 2 bytes
    assert kv_bytes_per_token(shape, config) == 147456
    assert engine_weights(shape, config) == pytest.approx(16.38e9, rel=0.01)
    assert bundle_bytes(config, shape) == pytest.approx(8.19e9 * 14, rel=0.01)
    halves = configured(large, "engine.tensor_parallel=2")
    assert kv_bytes_per_token(shape, halves) * 2 == kv_bytes_per_token(shape, config)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5), st.integers(0, 1 << 42))
def test_a_phase_fits_exactly_up_to_its_budget(sizes: list[int], budget: int) -> None:
    parts = {f"part {index}": size for index, size in enumerate(sizes)}
    need = PhaseNeed("x", parts, budget, "")
    assert need.fits == (sum(sizes) <= budget)
    assert PhaseNeed("x", parts, need.total, "").fits
    assert all(f"part {index}" in need.text() for index, size in enumerate(sizes) if size)
