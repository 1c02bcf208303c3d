"""The probe's controller: outcomes, deadlines, masks. Faults come from a stand-in worker; see its docstring."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vime_devices import MaskError, Platform, ProbeError, cli
from vime_devices.probe import Arm, Outcome, ProbeOptions, default_masks, markdown, run_probe
from vime_devices.probe.channel import Channel
from vime_devices.probe.worker import decode, encode

WORKER = (sys.executable, "-S", str(Path(__file__).with_name("probe_worker_stand_in.py")))
NVIDIA = ["8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f", "1f2e3d4c-5b6a-4978-8899-aabbccddeeff"]
AMD_TEXT = ["65303434-3830-3136-3839-323537666230", "65303434-3830-3136-3839-323537666231"]
FAST = {"worker": WORKER, "start_s": 20, "open_s": 20}


def environ(uuids=NVIDIA, **more):
    return {"STAND_IN_UUIDS": json.dumps(uuids)} | more


def outcomes(result):
    return {(c.mask, c.exported, c.arm.value): (c.outcome.value, c.denotes) for c in result.cases}


def test_the_matrix_on_two_devices():
    result = run_probe(Platform.CUDA, environ(), ProbeOptions(masks=["0", "1", "0,1", "1,0"], **FAST))
    found = outcomes(result)
    assert len(found) == 16
    assert found["0", 1, "exported"] == ("refused", "")
    assert found["0", 1, "own"] == ("ok", "other")
    assert found["1", 1, "own"] == ("ok", "same")
    assert found["1,0", 1, "exported"] == ("ok", "other")
    assert found["0,1", 1, "exported"] == ("ok", "same")
    refused = next(case for case in result.cases if case.outcome is Outcome.REFUSED)
    assert refused.text == "CUDA error: invalid device ordinal"
    table = markdown(result)
    assert table.count("\n| `") == 8
    assert "| `0` | 1 | refused: CUDA error: invalid device ordinal | ok (the index is another GPU there) |" in table
    assert json.loads(json.dumps(result.to_json()))["cases"][0]["outcome"] == "ok"


def test_masks_by_uuid():
    result = run_probe(Platform.CUDA, environ(), ProbeOptions(masks=["uuid:1,0"], **FAST))
    assert {case.variable for case in result.cases} == {f"GPU-{NVIDIA[1]},GPU-{NVIDIA[0]}"}
    assert outcomes(result)["uuid:1,0", 1, "own"] == ("ok", "same")


def test_masks_by_uuid_on_hip_are_spelled_as_all_readers_take_them():
    result = run_probe(Platform.HIP, environ(AMD_TEXT), ProbeOptions(masks=["uuid:1"], **FAST))
    assert {case.variable for case in result.cases} == {"GPU-e044801689257fb1"}


def test_masks_count_among_the_exporters_devices():
    four = [*NVIDIA, *(uuid[::-1] for uuid in NVIDIA)]
    inherited = environ(four, CUDA_VISIBLE_DEVICES="2,3")
    result = run_probe(Platform.CUDA, inherited, ProbeOptions(masks=["1"], **FAST))
    assert {case.variable for case in result.cases} == {"3"}
    assert outcomes(result)["1", 1, "own"] == ("ok", "same")


def test_default_masks():
    assert default_masks(1) == ("0", "uuid:0")
    assert default_masks(2) == ("0", "1", "0,1", "1,0", "uuid:0", "uuid:1", "uuid:0,1", "uuid:1,0")
    assert default_masks(8)[:3] == ("0", "3", "7")
    assert "3,0,1,2,4,5,6,7" in default_masks(8)
    result = run_probe(Platform.CUDA, environ(NVIDIA[:1], CUDA_VISIBLE_DEVICES="0"), ProbeOptions(**FAST))
    assert {case.mask for case in result.cases} == {"0", "uuid:0"}


@pytest.mark.parametrize(
    ("fault", "outcome", "text"),
    [
        ("import:no-torch", Outcome.REFUSED, "ImportError: No module named 'torch'"),
        ("import:die", Outcome.REFUSED, "exit status 1: segmentation fault, or something like it"),
        ("import:garbage", Outcome.REFUSED, "broke the protocol: 'Segmentation fault\\n'"),
        ("import:list", Outcome.REFUSED, "broke the protocol: '[]\\n'"),
        ("import:refuse", Outcome.REFUSED, "out of memory"),
        ("export:refuse", Outcome.REFUSED, "export: out of memory"),
        ("export:zeros", Outcome.WRONG_DEVICE, "unknown bytes"),
    ],
)
def test_each_fault_has_its_outcome(fault, outcome, text):
    options = ProbeOptions(masks=["0"], jobs=1, **FAST)
    result = run_probe(Platform.CUDA, environ(NVIDIA[:1], STAND_IN=fault, CUDA_VISIBLE_DEVICES="0"), options)
    for case in result.cases:
        assert (case.outcome, text in case.text) == (outcome, True), case


def test_bytes_of_another_allocation_are_told_from_the_right_ones():
    result = run_probe(Platform.CUDA, environ(STAND_IN="export:stale"), ProbeOptions(masks=["0,1"], jobs=1, **FAST))
    first, *others = result.cases
    assert first.outcome is Outcome.OK
    assert {(c.outcome, c.text) for c in others} == {(Outcome.WRONG_DEVICE, "bytes exported from ordinal 0")}


@pytest.mark.parametrize("fault", ["import:hang", "import:hang-start"])
def test_an_importer_that_hangs_is_a_timeout_and_is_ended(fault):
    start = time.monotonic()
    options = ProbeOptions(masks=["0"], worker=WORKER, start_s=3 if fault == "import:hang-start" else 20, open_s=1)
    result = run_probe(Platform.CUDA, environ(NVIDIA[:1], STAND_IN=fault, CUDA_VISIBLE_DEVICES="0"), options)
    assert {case.outcome for case in result.cases} == {Outcome.TIMEOUT}
    assert "said nothing for" in result.cases[0].text
    assert time.monotonic() - start < 55, "a worker that hangs sleeps for 60 s"


def test_a_late_export_is_not_taken_for_the_next_one():
    options = ProbeOptions(masks=["0,1"], jobs=1, worker=WORKER, start_s=20, open_s=1.5)
    result = run_probe(Platform.CUDA, environ(STAND_IN="export:late"), options)
    assert [case.outcome.value for case in result.cases] == ["ok", "timeout", "ok", "ok"]


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("export:no-torch", "No module named 'torch'"),
        ("export:die", "ended early"),
        ("export:hang-start", "did not start"),
    ],
)
def test_without_an_exporter_there_is_no_probe(fault, what):
    options = ProbeOptions(worker=WORKER, start_s=1 if fault == "export:hang-start" else 20, open_s=1)
    with pytest.raises(ProbeError, match=what):
        run_probe(Platform.CUDA, environ(STAND_IN=fault), options)


def test_no_device_and_a_mask_that_names_none():
    with pytest.raises(ProbeError, match="no device to probe"):
        run_probe(Platform.CUDA, environ(CUDA_VISIBLE_DEVICES="-1"), ProbeOptions(**FAST))
    with pytest.raises(MaskError, match="the mask beneath it hides"):
        run_probe(Platform.CUDA, environ(), ProbeOptions(masks=["2"], **FAST))


def test_a_child_that_closes_its_output_and_lives_on(monkeypatch):
    monkeypatch.setattr("vime_devices.probe.channel.GRACE_S", 0.5)
    with Channel([*WORKER, "import"], environ(STAND_IN="import:mute"), "mute") as channel:
        with pytest.raises(ProbeError, match="still running with its output closed"):
            channel.receive(20)
        channel._process.kill()


def test_a_child_that_has_ended_cannot_be_told_anything():
    with Channel([*WORKER, "import"], environ(STAND_IN="import:die"), "dead") as channel:
        channel._process.wait(20)
        with pytest.raises(ProbeError, match="ended early"):
            channel.send(anything="x" * 100_000)


def test_handles_travel_as_text():
    shared = (1, b"\x00handle\xff", 2 << 20, 512, b"counter", 7, b"event", True)
    assert decode(json.loads(json.dumps(encode(shared)))) == shared


@pytest.mark.parametrize(("fault", "status"), [("", 0), ("export:zeros", 1)])
def test_the_command(capsys, monkeypatch, fault, status):
    for name, value in environ(NVIDIA[:1], STAND_IN=fault, CUDA_VISIBLE_DEVICES="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vime_devices.probe.controller.WORKER", WORKER)
    assert cli.main(["probe-ipc", "--platform", "cuda", "--masks", "0", "--json"]) == status
    assert len(json.loads(capsys.readouterr().out)["cases"]) == len(Arm)
    assert cli.main(["probe-ipc", "--platform", "cuda", "--masks", "0"]) == status
    assert "| importer's mask |" in capsys.readouterr().out


def test_the_real_worker_says_so_where_there_is_no_device(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed; the real worker needs it to say anything")
    if torch.cuda.is_available():
        pytest.skip("this host has a device; test_devices_gpu.py runs the real probe")
    done = subprocess.run(
        [sys.executable, "-m", "vime_devices.probe.worker", "export"],
        input="",
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = json.loads(done.stdout)
    assert (done.returncode, message["event"]) == (1, "error")
    assert message["text"]
