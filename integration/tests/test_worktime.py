"""When generation worked: the stretches with something in flight, and the time of each batch."""

from __future__ import annotations

from vime_integration.phases import LANES, Phases
from vime_integration.worktime import Worked, WorkTime


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


def test_busy_and_idle_make_up_all_the_time_and_are_told_once() -> None:
    clock = Clock()
    times = WorkTime(clock)
    assert times.taken([]) == Worked([], 0.0, None), "nothing has begun"
    times.working(True)
    clock.after(3)
    times.working(True)
    clock.after(1)
    times.working(False)
    clock.after(2)
    times.working(True)
    clock.after(5)
    assert times.taken([]) == Worked([(100, 104), (106, 111)], 2.0, None)
    clock.after(1)
    assert times.taken([]) == Worked([(111, 112)], 0.0, None), "a stretch that goes on is cut where a batch is taken"
    times.working(False)
    clock.after(4)
    assert times.taken([]) == Worked([], 4.0, None)
    clock.after(1)
    assert times.taken([]).idle_s == 1.0


def test_a_batch_reaches_from_its_first_begin_to_its_last_end() -> None:
    clock = Clock()
    times = WorkTime(clock)
    for group in ("a", "b", "dropped", "c"):
        times.begin(group)
        clock.after(1)
    times.done("b")
    clock.after(1)
    times.done("a")
    times.forget("dropped")
    assert times.taken(["a", "b", "of before a resume"]).made == (100, 105)
    clock.after(1)
    times.done("c")
    assert times.taken(["c"]).made == (103, 106)
    assert times.taken(["of before a resume"]).made is None


def test_the_drivers_phases_go_into_the_lane_of_those_who_work() -> None:
    noted: list[tuple[int, str, str]] = []
    phases = Phases(3, note=lambda step, lane, phase, begin, end: noted.append((step, lane, phase)))
    for name in ("offload", "rollout", "sleep", "onload", "train", "wake", "update_weights", "wake"):
        with phases.phase(name):
            pass
    assert noted == [(3, LANES[name], name) for name in ("offload", "rollout", "sleep", "onload")] + [
        (3, "offload", "wake"),
        (3, "sync", "update_weights"),
        (3, "offload", "wake"),
    ]
    assert {"perf/train_time", "perf/wake_time", "perf/step_time"} <= phases.metrics().keys()
