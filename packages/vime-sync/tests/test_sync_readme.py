"""The examples of the README and of OPERATING.md run as they are printed, against engines over HTTP."""

import json
import re
from pathlib import Path

import pytest
import sync_fault_lab as lab
import torch
from sync_alias import laid_out, let_go, on_memory
from sync_fake_engine import FakeControl, FakeModel, checkpoint, content_of
from vime_sync import EngineError, engine_arguments, engine_environment


def blocks(name):
    """The Python examples of a document."""
    text = (Path(__file__).parents[1] / name).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS = blocks("README.md")
SERVER, PLAIN, FSDP, OTHER = BLOCKS
CHOOSE, ALIASED, RESTART = blocks("OPERATING.md")


def tree(tensors):
    """A module whose parameters have the given dotted names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))
    return root


def step_to(seed):
    """A training step that ends at the weights of a checkpoint."""

    def step(model):
        with torch.no_grad():
            for name, tensor in checkpoint(seed).items():
                model.get_parameter(name).copy_(tensor)

    return step


def test_there_are_examples_of_fifteen_lines_or_so():
    assert all(len(block.splitlines()) <= 16 for block in BLOCKS)


def test_the_server_block_starts_a_process_with_the_plugin(monkeypatch):
    import subprocess

    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: started.append((command, env)))
    exec(SERVER, {})
    ((command, env),) = started
    assert "vime_sync" in env["VLLM_PLUGINS"].split(",")
    assert env.items() >= engine_environment().items()
    assert command[-len(engine_arguments()) :] == engine_arguments()


def test_the_plain_loop(engines):
    engine = engines()
    exec(PLAIN, {"model": tree(checkpoint(0)), "url": engine.url, "steps": 2, "train_one_step": step_to(6)})
    assert engine.content() == content_of(6)
    assert engine.control.tag == "2"


class Fused(torch.nn.Module):
    """A framework that keeps query, key and value in one matrix and has names of its own."""

    def __init__(self, tensors):
        super().__init__()
        self.embedding = tree({"weight": tensors["embed.weight"]})
        self.final_norm = tree({"weight": tensors["norm.weight"]})
        self.layers = torch.nn.ModuleList()
        for index in range(2):
            own = {
                n.removeprefix(f"layers.{index}."): t for n, t in tensors.items() if n.startswith(f"layers.{index}.")
            }
            rows = [own.pop(f"{part}_proj.weight") for part in "qkv"]
            layer = tree({"qkv.weight": torch.cat(rows)} | {f"rest.{n}": t for n, t in own.items()})
            layer.qkv_rows = [len(row) for row in rows]
            layer.other_weights = layer.rest.named_parameters
            self.layers.append(layer)


def test_the_choice_says_why(capsys):
    exec(CHOOSE, {})
    shown = re.search(r"print\(choice\)  # (.*) \.\.\.", CHOOSE).group(1)
    assert capsys.readouterr().out.startswith(shown)


def test_the_aliased_loop(engines, tmp_path):
    source, controls = laid_out(), []

    def start(weights, manifest):
        assert weights == "alias"
        controls.append(FakeControl([on_memory(FakeModel(), json.loads(manifest.read_text()))]))
        return engines(control=controls[-1]).url

    def step():
        for tensor in source.tensors:
            for piece in tensor.pieces:
                source.view(piece.region).copy_(checkpoint(6)[tensor.name])

    scope = {"source": source, "transport": "shm", "manifest": tmp_path / "manifest.json", "start_engine": start}
    exec(ALIASED, scope | {"steps": 2, "compute_gradients": lambda: None, "optimiser_step": step})
    assert controls[0].tag == "2"
    assert [model.content() for model in controls[0].models] == content_of(6)
    let_go(controls[0])


@pytest.mark.parametrize("committed", [False, True])
def test_an_engine_that_starts_again(engines, trainers, committed):
    trainer, first, dead, fresh = trainers(checkpoint(1)), engines(), engines(), engines(seed=9)
    session = trainer.session(first, dead)
    trainer.publisher.stage(1)
    session.update(1)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    client = session._engines[1]
    real, lost = client.call, "commit" if committed else "stage"

    def call(operation, body=None):
        if operation in (lost, "abort", "disconnect"):
            raise EngineError("an engine cannot be reached", where=operation)
        return real(operation, body)

    client.call = call
    exec(RESTART, {"session": session, "version": 2, "dead": dead.url, "fresh": fresh.url})
    assert session.versions() == [2, 2]
    assert first.content() == fresh.content() == content_of(2)


def test_another_frameworks_module(engines):
    engine = engines(world=2)
    exec(OTHER, {"model": Fused(checkpoint(7)), "url": engine.url, "transport": "shm"})
    assert engine.content() == content_of(7, 2)


def fsdp_rank(pipe, rank, store, url):
    """One rank of the FSDP2 example."""
    import torch.distributed as dist

    lab.die_with_parent()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = tree(checkpoint(0))

    def step(model):
        with torch.no_grad():
            for name, tensor in checkpoint(8).items():
                parameter = model.get_parameter(name)
                half = -(-tensor.shape[0] // 2)
                parameter.to_local().copy_(tensor[:half] if rank == 0 else tensor[half:])

    exec(FSDP, {"model": model, "url": url, "steps": 2, "train_one_step": step, "transport": "shm"})
    dist.destroy_process_group()
    pipe.send_bytes(json.dumps("done").encode())
    pipe.recv_bytes()


@pytest.mark.timeout(120)
def test_fsdp2(engines, tmp_path):
    engine, fork = engines(world=2), lab.context()
    pipes, ranks = [], []
    try:
        for rank in range(2):
            ours, theirs = fork.Pipe()
            ranks.append(fork.Process(target=fsdp_rank, args=(theirs, rank, str(tmp_path / "store"), engine.url)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.poll(90), "a rank did not finish"
            assert json.loads(pipe.recv_bytes()) == "done"
        assert engine.content() == content_of(8, 2)
        assert engine.control.tag == "2"
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
