"""The model is the one that transformers builds from the same folder."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the reference here, not a dependency")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logprobs_equal_those_of_transformers(make_trainer, tiny, tiny_tied, batch, tied):
    folder = tiny_tied if tied else tiny
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trainer = make_trainer(folder, temperature=0.8)
    found = trainer.logprobs(batch)
    for index, sequence in enumerate(batch):
        with torch.no_grad():
            logits = reference(sequence.tokens[None]).logits[0, :-1] / 0.8
        wanted = logits.log_softmax(-1).gather(1, sequence.tokens[1:, None]).squeeze(1)
        assert found[index][0] == 0.0
        torch.testing.assert_close(found[index][1:], wanted, rtol=0, atol=1e-4)


def test_logits_equal_those_of_transformers(make_trainer, tiny, batch):
    from vime_megatron.model.packing import inverse_frequencies, pack

    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    trainer = make_trainer(tiny)
    documents = [sequence.tokens for sequence in batch]
    row = pack(documents, inverse_frequencies=inverse_frequencies(8, 10000.0), device=torch.device("cpu"))
    with torch.no_grad(), trainer._platform.active():
        logits = trainer.model.run(row)[:, 0] @ trainer.model.output_weight().t()
        wanted = torch.cat([reference(tokens[None]).logits[0] for tokens in documents])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
