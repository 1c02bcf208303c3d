"""Saving in the background, keeping the newest, and a format that others open and that runs no code."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading

import pytest
import torch
from safetensors.torch import load_file
from vime_megatron import CheckpointError, TrainerError, sft_loss
from vime_megatron.checkpoint import folders
from vime_megatron.checkpoint import save as saving
from vime_megatron.checkpoint.folders import fingerprints
from vime_megatron.checkpoint.storage import Reader

DEADLINE_S = 60.0


@pytest.fixture
def gate(monkeypatch):
    """Hold saves at the moment before they write; released by ``set``, and at the end of the test."""
    opened, original = threading.Event(), saving._Job._write

    def write(job):
        assert opened.wait(DEADLINE_S)
        original(job)

    monkeypatch.setattr(saving._Job, "_write", write)
    yield opened
    opened.set()


def test_a_background_save_holds_the_state_of_its_moment(make_trainer, tiny, batch, tmp_path, gate):
    trainer = make_trainer(tiny, dtype="bfloat16")
    trainer.step(batch, sft_loss)
    handle = trainer.save(tmp_path / "saved", asynchronous=True)
    wanted = [trainer.step(batch, sft_loss).loss for _ in range(2)]
    with pytest.raises(CheckpointError, match=r"still being written.*not complete after 0 s"):
        handle.wait(0.0)
    assert not handle.done
    assert not (tmp_path / "saved").exists()
    gate.set()
    handle.wait(DEADLINE_S)
    assert handle.done
    trainer.load(tmp_path / "saved")
    assert trainer.state.step == 1
    assert [trainer.step(batch, sft_loss).loss for _ in range(2)] == wanted


def test_the_next_save_waits_for_the_one_before(make_trainer, tiny, tmp_path, gate):
    trainer = make_trainer(tiny, timeout_s=0.01)
    first = trainer.save(tmp_path / "first", asynchronous=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="still being written"):
            trainer.save(tmp_path / "second")
    gate.set()
    first.wait(DEADLINE_S)
    trainer.save(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_failure_nobody_waited_for_is_raised_by_the_next_call(make_trainer, tiny, tmp_path, monkeypatch):
    trainer = make_trainer(tiny)

    def full(job):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving._Job, "_write", full)
    for call in (lambda: trainer.load(tmp_path / "saved"), trainer.close):
        trainer.save(tmp_path / "saved", asynchronous=True)
        with pytest.raises(CheckpointError, match=r"nothing was published.*No space left"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_thread_s_surprise_reaches_the_waiter(make_trainer, tiny, tmp_path, monkeypatch):
    trainer = make_trainer(tiny)
    monkeypatch.setattr(saving, "write_head", lambda *_: {}["gone"])
    handle = trainer.save(tmp_path / "saved", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"the save failed.*KeyError: 'gone'") as caught:
        handle.wait(DEADLINE_S)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_process_is_forked_or_started(make_trainer, tiny, tmp_path, monkeypatch):
    """A process that has started HIP or CUDA must not fork; Megatron-Core's own writer would."""

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(multiprocessing.Process, "start", refuse)
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "saved", asynchronous=True).wait(DEADLINE_S)
    trainer.save(tmp_path / "saved")
    trainer.load(tmp_path / "saved")


def test_the_newest_are_kept_and_nothing_else_is_touched(make_trainer, tiny, tmp_path):
    trainer = make_trainer(tiny)
    for name in ("step-1", "step-2", "step-3", "step-30", "other-1"):
        trainer.save(tmp_path / name)
    (tmp_path / "step-0").mkdir()  # no checkpoint, so not ours to delete
    trainer.save(tmp_path / "step-10", keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other-1", "step-0", "step-10", "step-3", "step-30"]
    trainer.save(tmp_path / "step-11", keep=1, asynchronous=True).wait(DEADLINE_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "step-0", "step-11", "step-30"]
    with pytest.raises(CheckpointError, match=r"name 'newest'.*ends in a number"):
        trainer.save(tmp_path / "newest", keep=2)
    with pytest.raises(TrainerError, match="keep"):
        trainer.save(tmp_path / "step-12", keep=0)


def test_old_checkpoints_that_cannot_be_deleted_undo_nothing(make_trainer, tiny, tmp_path, monkeypatch, caplog):
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "step-1")

    def busy(folder):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(folders.shutil, "rmtree", lambda path, **kind: None if kind else busy(path))
    trainer.save(tmp_path / "step-2", keep=1)
    assert "could not be deleted" in caplog.text
    trainer.load(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match="no such folder"):
        trainer.load(tmp_path / "step-1")  # half a folder is never left under its name


def test_progress_counts_every_byte(make_trainer, tiny, batch, tmp_path):
    trainer = make_trainer(tiny)
    trainer.step(batch, sft_loss)
    seen = {"save": [], "load": [], "export": []}
    trainer.save(tmp_path / "saved", progress=lambda *pair: seen["save"].append(pair))
    trainer.load(tmp_path / "saved", progress=lambda *pair: seen["load"].append(pair))
    trainer.export_hf(tmp_path / "hf", progress=lambda *pair: seen["export"].append(pair))
    weights = sum(param.nbytes for param in trainer.params.values())
    totals = {"save": 3 * weights + torch.get_rng_state().nbytes, "load": 3 * weights, "export": weights}
    for name, pairs in seen.items():
        done = [count for count, _ in pairs]
        assert done == sorted(done)
        assert {total for _, total in pairs} == {totals[name]}
        assert done[-1] == totals[name]


def test_megatron_core_opens_it(make_trainer, model_of, batch, tmp_path):
    """The folder is Megatron-Core's ``torch_dist``, under the model's Hugging Face names."""
    from megatron.core import dist_checkpointing

    trainer = make_trainer(model_of("qwen3-moe"))
    trainer.step(batch, sft_loss)
    trainer.save(tmp_path / "saved")
    trainer.export_hf(tmp_path / "hf")
    folder = str(tmp_path / "saved")
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    with trainer._platform.active():
        tensors = dist_checkpointing.load_plain_tensors(folder)
        common = dist_checkpointing.load_common_state_dict(folder)
    wanted = load_file(tmp_path / "hf" / "model.safetensors")
    assert {key for key in tensors if key.startswith("model.")} == {"model." + name for name in wanted}
    assert all(torch.equal(tensors["model." + name], tensor) for name, tensor in wanted.items())
    assert {key for key in tensors if key.startswith("optimizer.exp_avg.")} == {
        f"optimizer.exp_avg.{n}" for n in wanted
    }
    assert common["step"] == 1


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_metadata_cannot_run_code(make_trainer, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(tiny).save(tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    assert Reader(path.parent).read_metadata().state_dict_metadata
    path.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match=r"mkdir does not belong in a checkpoint's metadata"):
        Reader(path.parent).read_metadata()
    assert not (tmp_path / "exploded").exists()
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Reader(path.parent).read_metadata()
    assert fingerprints([path])[".metadata"]["bytes"] == 0
