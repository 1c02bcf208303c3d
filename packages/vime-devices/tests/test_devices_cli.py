"""The command line, run in this process, and once as a command."""

import json
import subprocess
import sys

import pytest
from vime_devices import Platform, cli
from vime_devices.topology import synthetic_node

MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_masks(monkeypatch):
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli, "detect_platform", lambda: Platform.CPU)


def run(capsys, *arguments):
    status = cli.main(arguments)
    return status, capsys.readouterr()


def test_the_reference_mask(capsys):
    status, output = run(capsys, "mask", "--platform", "hip", "--own", "3", "--node", "0-7")
    assert (status, output.out) == (0, "3,0,1,2,4,5,6,7\n")


def test_mask_as_json(capsys):
    _, output = run(capsys, "mask", "--platform", "cuda", "--own", "3,1", "--node", "0-7", "--json")
    assert json.loads(output.out) == {"mask": "3,1", "local_indices": [0, 1], "platform": "cuda"}


def test_mask_on_this_machines_node(capsys, monkeypatch):
    monkeypatch.setattr(cli, "detect_platform", lambda: Platform.HIP)
    monkeypatch.setattr(cli, "discover_node", lambda platform: synthetic_node(platform, 3))
    assert run(capsys, "mask", "--own", "2")[1].out == "2,0,1\n"


def test_a_device_that_the_node_lacks(capsys):
    status, output = run(capsys, "mask", "--platform", "hip", "--own", "8", "--node", "0-7")
    assert (status, output.out) == (2, "")
    assert "the node does not have" in output.err
    assert "seen: 8" in output.err


def test_explain_as_a_table(capsys, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    status, output = run(capsys, "explain", "--platform", "hip", "--gpus", "8")
    assert status == 0
    lines = output.out.splitlines()
    assert lines[0].split() == ["layer", "reads", "leaves", "why"]
    assert any(line.startswith("hip node") and "assumed" in line for line in lines)
    assert any(line.startswith("rocr") and "2 [4,5]" in line for line in lines)
    assert any(line.startswith("hip ") and "0 [none]" in line for line in lines)
    assert "Readers disagree:" in output.out
    assert "ERROR rocr-with-hip (this process)" in output.out


def test_explain_as_json_from_a_tree(capsys, monkeypatch, kfd, gpu):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    tree = kfd([gpu(i // 2) | {"location_id": gpu(i // 2)["location_id"] | i % 2} for i in range(4)])
    status, output = run(capsys, "explain", "--kfd-root", str(tree), "--json")
    data = json.loads(output.out)
    assert status == 0
    assert [(d["ordinal"], d["physical"], d["partition"]) for d in data["devices"]] == [(0, 1, 1), (1, 0, 0)]
    assert data["devices"][0]["id"] == "amd:e044801689257fb0/p1"
    assert data["torch"] == [1, 0]
    assert [layer["reader"] for layer in data["layers"]] == ["rocr", "hip"]
    assert {"code", "severity", "message", "fix"} <= set(data["findings"][0])
    assert not data["assumed"]


def test_explain_where_torch_asks_the_runtime(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "asks the runtime" in run(capsys, "explain", "--platform", "cuda", "--gpus", "1")[1].out


def test_explain_lists_partitions(capsys, kfd, gpu):
    tree = kfd([gpu(0) | {"location_id": gpu(0)["location_id"] | part << 28} for part in range(8)])
    assert "CPX p7" in run(capsys, "explain", "--kfd-root", str(tree))[1].out


def test_a_tree_belongs_to_hip(capsys, tmp_path):
    status, output = run(capsys, "explain", "--platform", "cuda", "--kfd-root", str(tmp_path))
    assert (status, "belongs to HIP" in output.err) == (2, True)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", [["explain"], ["probe-ipc"], ["snapshot"], ["mask", "--own", "0"]])
def test_without_a_gpu_the_question_cannot_be_answered(capsys, command):
    status, output = run(capsys, *command)
    assert (status, output.out) == (2, "")
    assert "no AMD or NVIDIA device" in output.err


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor_calls_a_host_without_devices_ill(capsys):
    status, output = run(capsys, "doctor")
    assert (status, "ERROR no-node (this host)" in output.out) == (1, True)
    status, output = run(capsys, "doctor", "--json")
    data = json.loads(output.out)
    assert (status, data["devices"], data["findings"][0]["code"]) == (1, [], "no-node")


def test_the_doctor_on_a_healthy_and_an_ill_environment(capsys, monkeypatch):
    command = ["doctor", "--platform", "hip", "--gpus", "2"]
    status, output = run(capsys, *command)
    assert (status, "this process" in output.out) == (0, True)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    status, output = run(capsys, *command, "--json")
    data = json.loads(output.out)
    assert status == 1
    assert data["findings"][0]["code"] == "hip-cuda-differ"
    assert [(d["ordinal"], d["physical"]) for d in data["devices"]] == [(0, 0)]
    assert data["snapshots"][0]["name"] == "this process"


def test_the_doctor_reads_snapshots_of_several_processes(capsys, monkeypatch, tmp_path):
    files = []
    for name, mask, own in (("trainer", "0,1,2,3", "3"), ("engine", "3", "0")):
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", mask)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        node = ["--platform", "hip", "--gpus", "4"]
        status, output = run(capsys, "snapshot", "--name", name, "--own", own, *node)
        assert status == 0
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(output.out)
    status, output = run(capsys, "doctor", "--snapshots", *map(str, files))
    assert status == 1
    assert "ERROR ipc-ordinal-missing (trainer -> engine)" in output.out
    assert "masks 0,1,2,3" in output.out


def test_snapshots_that_cannot_be_read(capsys, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for path in (tmp_path / "bad.json", tmp_path / "absent.json"):
        status, output = run(capsys, "doctor", "--snapshots", str(path))
        assert (status, "cannot be read" in output.err) == (2, True)


def test_a_healthy_doctors_text_without_findings():
    from vime_devices.report import findings_text

    assert findings_text([]) == "No findings."


def test_a_reader_that_leaves_early():
    command = [sys.executable, "-m", "vime_devices.cli", "explain", "--platform", "hip", "--gpus", "64"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.wait(60) == 2
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_reader_that_leaves_early_in_this_process(monkeypatch):
    moved = []
    monkeypatch.setattr("builtins.print", lambda *_, **__: (_ for _ in ()).throw(BrokenPipeError()))
    monkeypatch.setattr("os.dup2", lambda *fds: moved.append(fds[1]))
    assert cli.main(["mask", "--platform", "hip", "--own", "0", "--node", "0"]) == 2
    assert moved == [1]


def test_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "vime_devices.cli", "mask", "--platform", "hip", "--own", "1", "--node", "0,1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1,0\n"
    assert subprocess.run([sys.executable, "-m", "vime_devices.cli"], capture_output=True).returncode == 2
