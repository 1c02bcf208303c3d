"""Checkpoints continue bit for bit; a failed save or a damaged file is an error that loses nothing."""

from __future__ import annotations

import json
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from vime_megatron import CheckpointError, ModelError, sft_loss

KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "distributed": {"optimizer": {"lr": 1e-2, "distributed": True}},
}


def finish(trainer, batch, steps=3):
    metrics = [trainer.step(batch, sft_loss) for _ in range(steps)]
    weights = {name: param.detach().clone() for name, param in trainer.params.items()}
    return [(m.loss, m.grad_norm, m.lr, m.step) for m in metrics], weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_bit_for_bit(make_trainer, tiny, batch, tmp_path, kind):
    settings = {"optimizer": {"lr": 1e-2, "schedule": "linear", "decay_steps": 9, "warmup_steps": 1}} | KINDS[kind]
    trainer = make_trainer(tiny, **settings)
    finish(trainer, batch, steps=2)
    trainer.save(tmp_path / "saved")
    drawn = torch.rand(3)
    wanted, weights = finish(trainer, batch)
    again = make_trainer(tiny, **settings)
    again.load(tmp_path / "saved")
    assert torch.equal(torch.rand(3), drawn)
    found, same = finish(again, batch)
    assert found == wanted
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_leaves_the_previous_checkpoint(make_trainer, tiny, batch, tmp_path):
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "saved")
    trainer.step(batch, sft_loss)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="stays valid"):
            trainer.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    trainer.load(tmp_path / "saved")
    assert trainer.state.step == 0


def test_a_save_that_died_between_the_renames_is_found(make_trainer, tiny, tmp_path):
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.previous")
    trainer.load(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_folder_that_is_no_checkpoint_is_refused(make_trainer, tiny, tmp_path):
    trainer = make_trainer(tiny)
    with pytest.raises(CheckpointError, match="no such folder"):
        trainer.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trainer.load(tiny)


def test_damage_is_noticed(make_trainer, tiny, tmp_path):
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "saved")
    path = tmp_path / "saved" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged.*__0_0\.distcp"):
        trainer.load(tmp_path / "saved")
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        trainer.load(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        trainer.load(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="unknown checkpoint format"):
        trainer.load(tmp_path / "saved")


def test_another_model_is_refused_by_name(make_trainer, tiny, model_of, tmp_path):
    llama = model_of("llama")
    make_trainer(tiny).save(tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["step"] == 0
    with pytest.raises(CheckpointError, match="dtype"):
        make_trainer(tiny, dtype="bfloat16").load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="architecture"):
        make_trainer(llama).load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tie_word_embeddings": True}, r"unexpected: model\.lm_head\.weight"),
        ({"num_hidden_layers": 3}, r"missing: model\.model\.layers\.2\..*and \d+ more"),
        ({"vocab_size": 60}, r"of another shape: model\.lm_head\.weight is \(61, 32\), not \(60, 32\)"),
    ],
)
def test_what_does_not_fit_is_listed(make_trainer, tiny, tmp_path, change, said):
    make_trainer(tiny).save(tmp_path / "saved")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | change))
    trainer = make_trainer(other, random_weights=True)
    before = {name: param.detach().clone() for name, param in trainer.params.items()}
    with pytest.raises(CheckpointError, match=said):
        trainer.load(tmp_path / "saved")
    assert all(torch.equal(before[name], param) for name, param in trainer.params.items())


def test_an_export_is_the_folder_again(make_trainer, tiny, tiny_tied, tmp_path):
    for number, folder in enumerate((tiny, tiny_tied)):
        for limit in (10**9, 8000):
            out = tmp_path / f"{number}-{limit}"
            make_trainer(folder).export_hf(out, max_file_bytes=limit)
            found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
            wanted = load_file(folder / "model.safetensors")
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert (out / "config.json").read_text() == (folder / "config.json").read_text()
            make_trainer(out)  # the index is one that reads back


def test_regions_hold_the_folder_s_tensors_and_follow_the_optimiser(make_trainer, tiny, batch, tmp_path):
    trainer = make_trainer(tiny)
    source = trainer.source()
    addresses = {name: buffer.data_ptr() for name, buffer in source.buffers.items()}
    for steps in (0, 2):
        for _ in range(steps):
            trainer.step(batch, sft_loss)
        trainer.export_hf(tmp_path / "now")
        wanted = load_file(tmp_path / "now" / "model.safetensors")
        assert {tensor.name for tensor in source.tensors} == wanted.keys()
        for tensor in source.tensors:
            [piece] = tensor.pieces
            assert torch.equal(source.view(piece.region), wanted[tensor.name])
    assert addresses == {name: buffer.data_ptr() for name, buffer in trainer.source().buffers.items()}


def test_nothing_else_is_replaced(make_trainer, tiny, tmp_path):
    """A checkpoint replaces a checkpoint, an export an export; a mistyped name deletes nobody's files."""
    trainer = make_trainer(tiny)
    trainer.save(tmp_path / "saved")
    trainer.export_hf(tmp_path / "hf")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    for folder, said in (("hf", r"no manifest\.json in it, but config\.json"), ("notes", "thesis"), ("file", "a file")):
        with pytest.raises(CheckpointError, match=rf"something else in this place.*{said}.*nothing was touched"):
            trainer.save(tmp_path / folder)
    for folder, said in (("saved", r"no config\.json in it"), ("notes", "thesis"), ("", "file, hf, notes, saved")):
        with pytest.raises(CheckpointError, match=rf"something else in this place.*{said}"):
            trainer.export_hf(tmp_path / folder)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    trainer.save(tmp_path / "empty")
    trainer.save(tmp_path / "saved")
    trainer.export_hf(tmp_path / "hf")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["model.safetensors"]}', "{}"])
def test_an_index_that_is_none_is_refused(make_trainer, tiny, tmp_path, text):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index of the weights cannot be read.*weight_map"):
        make_trainer(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nothing", "broken"])
def test_a_folder_that_does_not_fit_is_refused_with_names(make_trainer, tiny, tmp_path, fault):
    tensors = load_file(tiny / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    if fault == "missing":
        del tensors["model.norm.weight"]
    elif fault == "extra":
        tensors["model.extra"] = torch.ones(1)
    elif fault == "shape":
        tensors["model.norm.weight"] = torch.ones(3)
    if fault != "nothing":
        save_file(tensors, tmp_path / "model.safetensors")
    if fault == "broken":
        (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    text = {"missing": r"missing model\.norm", "extra": r"unexpected model\.extra", "shape": r"\(3,\)"}
    with pytest.raises(ModelError, match=text.get(fault, r"model\.safetensors")):
        make_trainer(tmp_path)
