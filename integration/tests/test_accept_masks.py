"""The reference fault: emulated where there is no GPU, judged from a probe's cases where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
from vime_devices import Platform
from vime_devices.probe import Arm, Case, Outcome, ProbeOptions, ProbeResult
from vime_integration.accept import Acceptance
from vime_integration.accept import stage_masks as module
from vime_integration.accept.stage_masks import emulated_ab, ipc_probe, judge_probe, mask_ab


def test_the_emulated_fault_is_there_and_the_mask_cures_it() -> None:
    report = emulated_ab()
    assert all(threshold.holds for threshold in report.thresholds)
    assert report.figures["mask"] == "3,0,1,2,4,5,6,7"
    cases = report.figures["cases"]
    assert [case for case, seen in cases.items() if seen != "exact checksum"] == ["rocm-7, GPU 3, narrow"]
    assert "emulated" in report.notes[0]


def result_of(platform: Platform, masks: list[str], broken: dict[tuple[str, int], Outcome], count: int) -> ProbeResult:
    devices = tuple({"ordinal": index, "uuid": str(index), "name": "made up"} for index in range(count))
    cases = tuple(
        Case(mask, mask, index, arm, broken.get((mask, index), Outcome.OK))
        for mask in masks
        for index in range(count)
        for arm in Arm
    )
    return ProbeResult(platform.value, "2.12", "7.14", devices, cases)


def with_probe(monkeypatch: pytest.MonkeyPatch, count: int, broken: dict[tuple[str, int], Outcome]) -> list[list[str]]:
    asked: list[list[str]] = []

    def probe(platform: Platform, _environ: object, options: ProbeOptions) -> ProbeResult:
        asked.append(list(options.masks))
        return result_of(platform, list(options.masks), broken, count)

    monkeypatch.setattr(module, "run_probe", probe)
    monkeypatch.setattr(module, "usable_gpus", lambda _acceptance: count)
    return asked


def test_on_hip_the_narrow_mask_is_evidence_and_the_wide_one_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = with_probe(monkeypatch, 8, {("3", 3): Outcome.REFUSED})
    report = mask_ab(Acceptance("rocm", 8, tmp_path))
    assert asked == [["3", "0", "3,0,1,2,4,5,6,7", "0,1,2,3,4,5,6,7"]]
    assert [threshold.holds for threshold in report.thresholds] == [True, True]
    assert report.figures["fault_reproduced"] is True
    with_probe(monkeypatch, 8, {("3,0,1,2,4,5,6,7", 3): Outcome.WRONG_DEVICE})
    report = mask_ab(Acceptance("rocm", 8, tmp_path))
    assert [threshold.holds for threshold in report.thresholds] == [False, True]
    assert report.figures["fault_reproduced"] is False


def test_on_two_cuda_gpus_the_mask_stays_narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = with_probe(monkeypatch, 2, {})
    report = mask_ab(Acceptance("cuda", 2, tmp_path))
    assert asked == [["1", "0"]]
    assert all(threshold.holds for threshold in report.thresholds)


def test_one_gpu_cannot_show_the_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_probe(monkeypatch, 1, {})
    assert "two are the least" in mask_ab(Acceptance("rocm", 1, tmp_path)).skipped


def test_a_cpu_has_nothing_to_probe(tmp_path: Path) -> None:
    assert "sync_bench" in ipc_probe(Acceptance("cpu", 0, tmp_path)).skipped


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({}, [True, True]),
        ({("1", 1): Outcome.REFUSED}, [True, True]),
        ({("1", 0): Outcome.WRONG_DEVICE}, [False, True]),
        ({("1,0", 1): Outcome.TIMEOUT}, [False, False]),
    ],
)
def test_a_probe_fails_on_wrong_memory_and_on_our_own_masks(
    broken: dict[tuple[str, int], Outcome], expected: list[bool]
) -> None:
    result = result_of(Platform.HIP, ["0", "1", "0,1", "1,0"], broken, 2)
    assert [threshold.holds for threshold in judge_probe(Platform.HIP, result)] == expected


def test_a_probe_that_tried_none_of_our_masks_does_not_pass() -> None:
    result = result_of(Platform.HIP, ["0", "1"], {}, 2)
    assert [threshold.holds for threshold in judge_probe(Platform.HIP, result)] == [True, False]
