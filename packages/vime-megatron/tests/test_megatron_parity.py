"""The model is the one that transformers builds from the same folder, in every family."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from vime_megatron.model.packing import inverse_frequencies, pack

transformers = pytest.importorskip("transformers", reason="transformers is the reference here, not a dependency")

KINDS = ["qwen3", "qwen3-tied", "qwen2", "qwen2-tied", "llama", "llama-tied", "qwen3-moe", "qwen3-moe-tied"]


@pytest.fixture
def reference_of(model_of):
    """The same folder in transformers."""

    def get(kind: str):
        model = transformers.AutoModelForCausalLM.from_pretrained(model_of(kind), dtype=torch.float32)
        return model.eval()

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_logprobs_equal_those_of_transformers(make_trainer, model_of, reference_of, batch, kind):
    reference = reference_of(kind)
    trainer = make_trainer(model_of(kind), temperature=0.8)
    documents = [sequence.tokens for sequence in batch]
    row = pack(documents, inverse_frequencies=trainer._frequencies, device=torch.device("cpu"))
    with torch.no_grad(), trainer._platform.active():
        logits = trainer.model.run(row)[:, 0] @ trainer.model.output_weight().t()
    wanted = [reference(tokens[None]).logits[0].detach() for tokens in documents]
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=0, atol=1e-4)
    assert logits.std() > 0.05  # or the comparison would say little
    found = trainer.logprobs(batch)
    for index, tokens in enumerate(documents):
        logprobs = (wanted[index][:-1] / 0.8).log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        assert found[index][0] == 0.0
        torch.testing.assert_close(found[index][1:], logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_is_bitwise_and_transformers_reads_it(make_trainer, model_of, reference_of, tmp_path, kind):
    """transformers' own save is read, and what is exported from it is that save again."""
    reference_of(kind).save_pretrained(tmp_path / "saved")
    make_trainer(tmp_path / "saved").export_hf(tmp_path / "again")
    saved, again = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "again"))
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).state_dict()
    assert all(torch.equal(read[name], value) for name, value in reference_of(kind).state_dict().items())


def test_llama3_frequencies_equal_those_of_transformers(make_trainer, model_of, reference_of):
    trainer = make_trainer(model_of("llama"))
    plain = inverse_frequencies(8, 1000.0)
    torch.testing.assert_close(trainer._frequencies, reference_of("llama").model.rotary_emb.inv_freq)
    ratio = plain / trainer._frequencies  # one wave is left, one is half slowed, two are slowed in full
    assert ratio[0] == 1.0
    assert 1.0 < ratio[1] < 8.0
    torch.testing.assert_close(ratio[2:], torch.tensor([8.0, 8.0]))
