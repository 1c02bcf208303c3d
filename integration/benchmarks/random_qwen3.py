"""Make a Hugging Face folder of a Qwen3 shape with random weights, to measure speed without a download.

    python integration/benchmarks/random_qwen3.py 8b TOKENIZER_FOLDER OUT_FOLDER

The weights are drawn on the GPU where there is one. Such a model says nothing and does not stop, so every response is
as long as it may be, and rewards are what chance makes of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config

#: Width, width of the feed-forward layer, layers, query heads; the published shapes have 8 key-value heads of 128.
SHAPES = {
    "0.6b": (1024, 3072, 28, 16),
    "1.7b": (2048, 6144, 28, 16),
    "4b": (2560, 9728, 36, 32),
    "8b": (4096, 12288, 36, 32),
}
VOCABULARY = 151_936
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(shape: Annotated[str, typer.Argument()], tokenizer: Path, out: Path) -> None:
    """Write the folder.

    Args:
        shape: One of the published sizes.
        tokenizer: A folder with a Qwen3 tokenizer.
        out: The folder to make.
    """
    hidden, inner, layers, heads = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape != "8b",
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    for name in TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, out / name)


if __name__ == "__main__":
    typer.run(make)
