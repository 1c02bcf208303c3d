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


def pull(logprobs_t, entropy_t, fields):
    """A loss that uses log-probabilities and entropies."""
    loss_t = fields["advantage"] * logprobs_t + 0.1 * entropy_t.square()
    return -(fields["weight"] * loss_t).sum(), {}


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3", "qwen3-moe"])
def test_three_updates_are_those_of_transformers_and_torch(
    make_trainer, model_of, reference_of, batch_of, tmp_path, kind
):
    """Gradients, their norm, clipping, warm-up, decay of rates and of weights, AdamW: autograd and torch's own."""
    reference = reference_of(kind)
    optimizer = {"lr": 1e-2, "beta2": 0.98, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "warmup_steps": 2}
    optimizer |= {"schedule": "linear", "decay_steps": 4}
    trainer = make_trainer(model_of(kind), temperature=0.7, max_tokens_per_microbatch=30, optimizer=optimizer)
    groups = [{"params": [p for p in reference.parameters() if (p.dim() > 1) is decays]} for decays in (True, False)]
    groups[1]["weight_decay"] = 0.0
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.1)
    for step, rate in enumerate((5e-3, 1e-2, 5e-3)):
        batch = batch_of(seed=step)
        found = trainer.step(batch, pull)
        loss = _loss(reference, batch)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert norm > 0.5
        assert (found.loss, found.grad_norm, found.lr) == pytest.approx((loss.item(), norm.item(), rate), rel=1e-5)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
    trainer.export_hf(tmp_path / "found")
    reference.save_pretrained(tmp_path / "wanted")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("found", "wanted"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def _loss(reference, batch):
    """The same loss of each sequence by itself, over the whole logits."""
    total = torch.zeros(())
    for sequence in batch:
        logprobs_sv = (reference(sequence.tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        logprobs = logprobs_sv.gather(1, sequence.tokens[1:, None]).squeeze(1)
        entropy = -(logprobs_sv.exp() * logprobs_sv).sum(-1)
        total = total + pull(logprobs, entropy, {name: values[1:] for name, values in sequence.fields.items()})[0]
    return total
