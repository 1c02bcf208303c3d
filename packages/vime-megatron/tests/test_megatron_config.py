"""Settings are checked when they are made, and the error names the setting."""

from __future__ import annotations

import json
import pickle

import pytest
from vime_megatron import OptimizerSettings, TrainerConfig, TrainerError


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"context_parallel": 0}, "context_parallel"),
        ({"max_sequence_length": 0}, "max_sequence_length"),
        ({"dtype": "float64"}, r"dtype.*'float64'.*'float32', 'bfloat16', 'float16'"),
        ({"recompute": "ful"}, "recompute.*'none', 'selective', 'full'"),
        ({"head_dtype": "fp32"}, "head_dtype"),
        ({"attention": "SDPA"}, "attention"),
        ({"kernels": "cuda"}, "kernels"),
        ({"device": "gpu"}, "device"),
        ({"tensor_parallel": 4, "sequence_parallel": True, "expert_tensor_parallel": 2}, "None, 1 or tensor_parallel"),
        ({"tensor_parallel": 2, "expert_tensor_parallel": 1}, "without sequence_parallel"),
    ],
)
def test_trainer_settings(settings, name):
    with pytest.raises(TrainerError, match=name):
        TrainerConfig(model="somewhere", **settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr": 0}, "lr"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"schedule": "cosine"}, "decay_steps"),
        ({"decay_steps": 100}, "decay_steps.*None with schedule 'constant'"),
        ({"schedule": "linear", "decay_steps": 5, "warmup_steps": 5}, "decay_steps"),
        ({"beta2": 1.0}, "beta2"),
        ({"clip_grad": -1}, "clip_grad"),
        ({"schedule": "cosin", "decay_steps": 9}, "schedule.*'constant', 'linear', 'cosine'"),
    ],
)
def test_optimizer_settings(settings, name):
    with pytest.raises(TrainerError, match=name):
        OptimizerSettings(**settings)


def test_experts_may_span_the_ranks_that_split_attention():
    sizes = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}
    TrainerConfig(model="m", **sizes, expert_tensor_parallel=1).check_world(4)
    with pytest.raises(TrainerError, match=r"seen: 2 data- and context-parallel ranks.*expert_parallel = 4"):
        TrainerConfig(model="m", **sizes).check_world(4)
    with pytest.raises(TrainerError, match=r"tensor x pipeline x context = 2"):
        TrainerConfig(model="m", **sizes).check_world(5)


def test_settings_are_json_and_errors_survive_pickling():
    assert json.loads(json.dumps(TrainerConfig(model="m").to_dict()))["optimizer"]["lr"] == 1e-6
    error = pickle.loads(pickle.dumps(TrainerError("what", where="here", seen="1", expected="2", fix="3")))
    assert (str(error), error.fix) == ("what (here); seen: 1; expected: 2; fix: 3", "3")
