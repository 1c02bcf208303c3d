"""Guards: what crosses a threshold is an alarm with the configured action, what does not is silence."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.config import GuardsSection
from vime_grpo.guards import Alarm, Guards, finite_metrics

ZERO = {"rollout/raw_reward": 0.0, "rollout/zero_std/ratio": 1.0, "rollout/zero_std/count_0": 8.0}


def guards(lag: int = 1, **settings: object) -> Guards:
    return Guards(GuardsSection.model_validate(settings), max_weight_lag=lag)


def names(alarms: list[Alarm]) -> list[str]:
    return [alarm.name for alarm in alarms]


def test_a_sound_step_raises_nothing() -> None:
    metrics = {
        "train/train_rollout_logprob_abs_diff": 0.1,
        "rollout/raw_reward": 0.5,
        "rollout/lag/max": 1.0,
        "sync/version": 4.0,
        "sync/engine_version/min": 4.0,
        "sync/engine_version/max": 4.0,
    }
    assert guards().check(3, metrics) == []
    assert guards().check(3, {}) == []


@pytest.mark.parametrize(
    ("metrics", "name", "text"),
    [
        ({"train/train_rollout_logprob_abs_diff": 0.2}, "logprob_difference", "0.2, expected at most 0.1"),
        ({"rollout/lag/max": 2.0}, "max_lag", "2 versions before .* at most 1"),
        (
            {"sync/version": 3.0, "sync/engine_version/min": 2.0, "sync/engine_version/max": 3.0},
            "engine_version",
            "version 2 to 3, expected 3",
        ),
        ({"sync/version": 3.0, "sync/engine_version/min": 2.0}, "engine_version", "version 2, expected 3"),
        ({"train/loss": math.inf}, "nonfinite", "1 metrics are not finite: train/loss = inf"),
    ],
)
def test_each_guard_stops_warns_or_is_off(metrics: dict[str, float], name: str, text: str) -> None:
    (alarm,) = guards().check(7, metrics)
    assert (alarm.name, alarm.action) == (name, "stop")
    assert alarm.text.startswith("step 7: ")
    with pytest.raises(ValueError, match=text):
        raise ValueError(alarm.text)
    (softer,) = guards(**{f"{name}_action": "warn"}).check(7, metrics)
    assert softer == Alarm(name, "warn", alarm.text)
    assert guards(**{f"{name}_action": "off"}).check(7, metrics) == []


def test_nan_is_above_every_threshold() -> None:
    metrics = {"train/train_rollout_logprob_abs_diff": math.nan}
    assert names(guards().check(1, metrics)) == ["nonfinite", "logprob_difference"]
    assert names(guards(nonfinite_action="off").check(1, metrics)) == ["logprob_difference"]
    assert finite_metrics(metrics | {"a": 1.0, "b": -math.inf}) == {"a": 1.0}


def test_zero_rewards_count_in_a_row_and_give_the_reasons() -> None:
    guard = guards(zero_rewards=2)
    assert guard.check(1, ZERO) == []
    assert guard.check(2, {"rollout/raw_reward": 0.25}) == []
    assert guard.check(3, ZERO) == []
    (alarm,) = guard.check(4, ZERO, [("no answer in the response", 60), ("wrong", 4)])
    assert (alarm.name, alarm.action) == ("zero_rewards", "warn")
    assert "in 2 steps in a row" in alarm.text
    assert alarm.text.endswith("no answer in the response (60 times); wrong (4 times)")
    assert "none were given" in guard.check(5, ZERO)[0].text


@pytest.mark.parametrize(
    "metrics",
    [
        ZERO | {"rollout/zero_std/ratio": 0.5},  # a group of 1 and -1
        ZERO | {"rollout/zero_std/count_1": 4.0, "rollout/zero_std/count_-1": 4.0},
        {"rollout/raw_reward": math.nan},
        {},
    ],
)
def test_a_mean_of_zero_is_not_yet_no_reward(metrics: dict[str, float]) -> None:
    assert "zero_rewards" not in names(guards(zero_rewards=1).check(1, metrics))
    assert names(guards(zero_rewards=1).check(1, {"rollout/raw_reward": 0.0})) == ["zero_rewards"]


def test_alarms_that_stop_come_first() -> None:
    metrics = ZERO | {"train/train_rollout_logprob_abs_diff": 9.0}
    guard = guards(zero_rewards=1, logprob_difference_action="warn", zero_rewards_action="stop")
    assert [alarm.action for alarm in guard.check(1, metrics)] == ["stop", "warn"]


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_a_resumed_run_raises_the_same_alarms(zeros: list[bool], cut: int, limit: int) -> None:
    whole, first = guards(zero_rewards=limit), guards(zero_rewards=limit)
    rewards = [ZERO if zero else {"rollout/raw_reward": 1.0} for zero in zeros]
    expected = [whole.check(step, metrics) for step, metrics in enumerate(rewards)]
    seen = [first.check(step, metrics) for step, metrics in enumerate(rewards[:cut])]
    second = guards(zero_rewards=limit)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    seen += [second.check(step, metrics) for step, metrics in enumerate(rewards[cut:], start=len(seen))]
    assert seen == expected
