"""Make the demo's policy: a tiny Qwen3 that answers sums and differences right about a third of the time.

    python tools/make_demo_policy.py --out integration/examples/models/tiny-qwen3

Reinforcement learning needs something to raise. This script gives a small model a short supervised start on
reasoning-gym's ``chain_sum`` in two stages, through the trainer's own SFT loss:

1. right answers, until the model can add and subtract;
2. answers of a careless student: right with probability ``--right``, else off by a small slip.

The result knows the answers but does not commit to them. Everything follows from ``--seed``; the tokenizer is a
byte-level BPE learnt from the task's own sentences, with digits kept apart. The weights are float32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vime_megatron import MegatronTrainer, OptimizerSettings, TrainerConfig, TrainSequence, sft_loss

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SLIPS = tuple(slip for slip in range(-9, 10) if slip)
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "float32",
}


def problems(seed: int, size: int) -> Iterator[tuple[str, str]]:
    """Yield questions and answers of the task."""
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, **TASK):
        yield entry["question"], entry["answer"]


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from the task's sentences; digits stay single tokens, any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    chat = [f"user\n{question}\n" for question, _ in problems(seed, 500)] + ["assistant\n", "system\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chat, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=512)
    fast.chat_template = TEMPLATE
    return fast


def make_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write configuration and tokenizer; the trainer draws the weights."""
    tokenizer.save_pretrained(folder)
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    ids = {"eos_token_id": end, "pad_token_id": pad, "bos_token_id": None}
    config = SHAPE | ids | {"vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


class Pupil:
    """The model in training: turns problems into sequences and steps the trainer."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, steps: int, lr: float, seed: int) -> None:
        """Start from random weights."""
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)  # noqa: S311
        settings = OptimizerSettings(
            lr=lr, min_lr=lr / 10, schedule="cosine", warmup_steps=20, decay_steps=steps, beta2=0.98, weight_decay=0.01
        )
        self.trainer = MegatronTrainer(
            TrainerConfig(model=folder, dtype="float32", random_weights=True, seed=seed, optimizer=settings)
        )

    def sequence(self, question: str, answer: str) -> tuple[list[int], int]:
        """Return the token ids of a dialogue and the length of its prompt."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer.encode(text)
        return prompt + self.tokenizer.encode(answer + END), len(prompt)

    def batch(self, pairs: list[tuple[str, str]]) -> list[TrainSequence]:
        """Weigh every answer token, end included, equally over the batch."""
        encoded = [self.sequence(question, answer) for question, answer in pairs]
        total = sum(len(tokens) - prompt for tokens, prompt in encoded)
        return [
            TrainSequence(
                torch.tensor(tokens),
                {"weight": torch.tensor([0.0] * prompt + [1.0 / total] * (len(tokens) - prompt))},
            )
            for tokens, prompt in encoded
        ]

    def learn(self, pairs: Iterator[tuple[str, str]], steps: int, size: int, right: float) -> None:
        """Take supervised steps on answers that are right with the given probability."""
        for step in range(steps):
            batch = [(question, self._answer(answer, right)) for question, answer in (next(pairs) for _ in range(size))]
            metrics = self.trainer.step(self.batch(batch), sft_loss)
            if step % 50 == 0 or step == steps - 1:
                print(f"step {metrics.step}: nll {metrics.loss:.4f}, grad norm {metrics.grad_norm:.3f}", flush=True)

    def _answer(self, answer: str, right: float) -> str:
        return answer if self.rng.random() < right else str(int(answer) + self.rng.choice(SLIPS))

    def accuracy(self, pairs: list[tuple[str, str]]) -> float:
        """Return the exact probability of sampling the right answer at temperature 1, averaged over problems."""
        batch = self.batch(pairs)
        scores = self.trainer.logprobs(batch)
        chances = [math.exp(float(scores[i][sequence.fields["weight"] > 0].sum())) for i, sequence in enumerate(batch)]
        return sum(chances) / len(chances)


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--right", type=float, default=0.42, help="chance that a stage-two answer is right")
    parser.add_argument("--steps", type=int, nargs=2, default=(220, 80), help="steps of the two stages")
    parser.add_argument("--size", type=int, default=128, help="problems a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    started = time.monotonic()
    first, second = options.steps
    tokenizer = make_tokenizer(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_folder(folder, tokenizer)
        pupil = Pupil(folder, tokenizer, first + second, options.lr, options.seed)
        lessons = problems(options.seed, options.size * (first + second))
        exam = list(problems(options.seed + 1, 256))
        pupil.learn(lessons, first, options.size, right=1.0)
        print(f"accuracy at temperature 1 after stage one: {pupil.accuracy(exam):.3f}")
        pupil.learn(lessons, second, options.size, right=options.right)
        print(f"accuracy at temperature 1 after stage two: {pupil.accuracy(exam):.3f}")
        readme = options.out / "README.md"
        kept = readme.read_text() if readme.is_file() else None
        shutil.rmtree(options.out, ignore_errors=True)
        pupil.trainer.export_hf(options.out)
        pupil.trainer.close()
        if kept is not None:
            readme.write_text(kept)
    print(f"{options.out}: made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
