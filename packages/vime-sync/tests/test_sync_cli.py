"""The command: push and verify against an engine over HTTP, bench between two processes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sync_fake_engine import checkpoint, content_of
from typer.testing import CliRunner
from vime_sync import cli
from vime_sync.bench import SHAPES, run_bench, shape_of_size
from vime_sync.cli import app, main
from vime_sync.errors import TransportError, UnknownNameError
from vime_sync.source import WeightSource
from vime_sync.verify import compare


@pytest.fixture
def folder(tmp_path):
    """A function that writes a checkpoint folder."""

    def write(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path)

    return write


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_push_brings_a_checkpoint_to_all_engines_and_verify_agrees(engines, folder):
    pair, where = (engines(), engines(world=2)), folder(checkpoint(5))
    servers = [part for engine in pair for part in ("--server", engine.url)]
    assert run("verify", where, *servers).exit_code == 1
    push = ("push", where, "--device", "cpu", *servers)
    done = run(*push)
    assert done.exit_code == 0
    assert "2 engines serve version 0" in done.output
    assert [engine.content() for engine in pair] == [content_of(5), content_of(5, 2)]
    again = run(*push, "--mode", "undo", "--json")
    assert json.loads(again.output)["version"] == 1
    checked = run("verify", where, *servers, "--json")
    assert checked.exit_code == 0
    assert [(r["equal"], r["version"], r["differing"], r["unread"]) for r in json.loads(checked.output)] == [
        (True, 1, [], []),
        (True, 1, [], []),
    ]


@pytest.mark.parametrize(
    ("device", "words"),
    [("pigeon", "unknown device"), ("cuda:99", "no such device"), ("meta", "no such device")],
)
def test_push_refuses_a_device_that_is_not_there(engines, folder, device, words):
    engine = engines()
    before = engine.content()
    refused = run("push", folder(checkpoint(5)), "--server", engine.url, "--device", device)
    assert isinstance(refused.exception, TransportError)
    assert words in str(refused.exception)
    assert engine.content() == before


def test_push_from_a_gpu_goes_through_ipc_and_says_when_it_does_not_fit(folder, monkeypatch):
    """No GPU is needed to see which transport is chosen, nor for an allocation that fails."""
    where, seen = Path(folder(checkpoint(5))), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [cli._device(asked) for asked in ("auto", "cpu", "cuda:1")] == [
        torch.device("cuda"),
        torch.device("cpu"),
        torch.device("cuda", 1),
    ]
    monkeypatch.setattr(cli, "Publisher", lambda source, transport: seen.append(transport))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    cli._published(where, torch.device("cuda", 1))
    cli._published(where, torch.device("cpu"))
    assert seen == ["ipc", "shm"]

    def full(tensor, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB.")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(TransportError, match=r"does not fit.*--device cuda:N"):
        cli._published(where, torch.device("cuda", 1))


@pytest.mark.parametrize("world", [1, 2])
def test_verify_names_the_one_tensor_that_differs(engines, folder, world):
    engine, tensors = engines(world=world), checkpoint(0)
    tensors["layers.1.k_proj.weight"][3, 2] += 1e-3
    found = compare(engine.url, WeightSource.from_tensors(tensors), deadline_s=20)
    assert found.differing == ("layers.1.k_proj.weight",)
    assert len(found.matching) == len(tensors) - 1
    result = run("verify", folder(tensors), "--server", engine.url)
    assert result.exit_code == 1
    assert "differs: layers.1.k_proj.weight" in result.output


def test_verify_says_what_it_cannot_read(engines):
    engine = engines()
    engine.model.obstacle = {"layers.0.o_proj.weight": "a kernel handle holds it packed"}
    found = compare(engine.url, WeightSource.from_tensors(checkpoint(0)), deadline_s=20)
    assert (found.equal, found.unread) == (True, ("layers.0.o_proj.weight",))


def test_verify_reads_the_memory_and_not_a_memory_of_it(engines, trainers):
    """A byte that changes after the commit is seen; a trainer that is connected stays connected."""
    engine, trainer = engines(), trainers(checkpoint(1))
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    session.update(1)
    source = WeightSource.from_tensors(checkpoint(1))
    assert compare(engine.url, source, deadline_s=20).equal
    engine.model.parameters["layers.0.experts.w2"][1, 0, 0] += 1
    assert compare(engine.url, source, deadline_s=20).differing == ("layers.0.experts.1.down_proj.weight",)
    trainer.publisher.stage(2)
    session.update(2)


def test_a_refusal_is_one_line_and_a_status(engines, folder, monkeypatch, capsys):
    engine = engines()
    where = folder(checkpoint(1) | {"surprise.weight": torch.ones(2)})
    monkeypatch.setattr("sys.argv", ["vime-sync", "push", where, "--server", engine.url, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"vime-sync: {UnknownNameError.__name__}")


@pytest.mark.parametrize(("transport", "mode"), [("shm", "alias"), ("gloo", "copy")])
def test_bench_measures_and_checks(transport, mode):
    if transport == "shm":
        result = run("bench", "--transport", transport, "--mode", mode, "--size-mb", 2, "--rounds", 2, "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.output)
    else:
        record = run_bench(transport, shape=shape_of_size(2), rounds=2).to_dict()
    assert record["digest_ok"] is True
    assert (record["transport"], record["mode"], len(record["seconds"])) == (transport, mode, 2)
    assert (record["gb_per_s"] > 0) == (mode == "copy")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_bench_says_what_is_missing(transport):
    """Before anything is allocated: the shape asked for here would not fit into any machine's memory."""
    needed = {"ipc": 1, "nccl": 2}[transport]
    with pytest.raises(TransportError) as refused:
        run_bench(transport, shape=SHAPES["qwen3-8b"])
    text = str(refused.value)
    assert text == f"there are not enough GPUs here ({transport}); seen: 0 GPUs; expected: {needed} or more"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--transport", "pigeon"), "unknown transport"),
        (("--transport", "gloo", "--mode", "alias"), "alias on shm, ipc"),
        (("--transport", "nccl", "--mode", "alias"), "alias on shm, ipc"),
        (("--transport", "ipc", "--mode", "shadow"), "alias on shm, ipc"),
        (("--transport", "ipc", "--model-shape", "gpt"), "give a known shape"),
        (("--transport", "ipc", "--model-shape", "qwen3-8b", "--size-mb", "5"), "give a known shape"),
    ],
)
def test_bench_refuses_what_cannot_be_measured(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["vime-sync", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    text = capsys.readouterr().err
    assert text.startswith("vime-sync: ")
    assert words in text


def test_shapes_have_the_published_sizes():
    assert SHAPES["qwen3-8b"].numel * 2 == pytest.approx(16.38e9, rel=1e-3)
    assert shape_of_size(500).numel * 2 == pytest.approx(500e6, rel=0.05)
