"""A complete small configuration on disk, to be changed by tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Machines that run tests are shared: how long an example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

RUN = """\
[model]
path = "model"

[data]
kind = "reasoning_gym"
task = "chain_sum"
size = 100
task_config = { max_terms = 2 }

[rollout]
batch_size = 8
samples_per_prompt = 4
max_response_tokens = 32
max_context_tokens = 128
stop = ["\\n\\n"]

[reward]
name = "reasoning_gym"

[pipeline]
steps = 3
run_dir = "../runs/small"
"""

MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    """Path of a valid configuration beside its model folder."""
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    path = folder / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def edit(run_toml: Path) -> Callable[[str, str], Path]:
    """Replace text in the configuration."""

    def change(old: str, new: str) -> Path:
        text = run_toml.read_text()
        assert old in text
        run_toml.write_text(text.replace(old, new))
        return run_toml

    return change
