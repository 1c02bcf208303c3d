"""Tiny models and rank processes shared by the tests of vime-megatron."""

from __future__ import annotations

import json
import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# Machines that run tests are shared: how long an example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
FAMILIES = {
    "qwen3-moe": MOE,
    "qwen3-moe-tied": MOE | {"tie_word_embeddings": True, "norm_topk_prob": False},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
}


def write_model(folder: Path, **changes) -> Path:
    """Make a model folder with random weights, through the trainer's own export."""
    from vime_megatron import MegatronTrainer, TrainerConfig
    from vime_megatron.weights.random import draw_weights

    folder.mkdir(parents=True)
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(TINY | changes))
    trainer = MegatronTrainer(TrainerConfig(model=source, dtype="float32", random_weights=True, seed=3))
    generator = torch.Generator().manual_seed(4)
    drawn = {name: torch.zeros(param.shape) for name, param in trainer.params.items()}  # on the CPU: alike everywhere
    draw_weights(drawn, trainer._placed, seed=3, std=trainer.shape.init_std)
    with torch.no_grad():
        for name, param in trainer.params.items():
            if param.dim() == 1:  # biases of 0 and norms of 1 would hide where they are used
                drawn[name].add_(0.1 * torch.randn(param.shape, generator=generator))
            param.copy_(drawn[name])
    trainer.export_hf(folder / "model")
    trainer.close()
    return folder / "model"


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Make a two-layer model of a kind listed in ``FAMILIES``, once per session."""
    made = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_model(tmp_path_factory.mktemp("models") / kind, **FAMILIES[kind])
        return made[kind]

    return get


@pytest.fixture(scope="session")
def tiny(model_of) -> Path:
    """A two-layer Qwen3, untied."""
    return model_of("qwen3")


@pytest.fixture(scope="session")
def tiny_tied(model_of) -> Path:
    """A two-layer Qwen3 whose output projection is its embedding."""
    return model_of("qwen3-tied")


@pytest.fixture
def make_trainer():
    """Build one-rank trainers; they are closed at the end of the test."""
    from vime_megatron import MegatronTrainer, OptimizerSettings, TrainerConfig

    made = []

    def make(model, **settings):
        optimizer = OptimizerSettings(**settings.pop("optimizer", {"lr": 1e-2}))
        for old in made:
            old.close()
        made.clear()
        made.append(MegatronTrainer(TrainerConfig(model=model, optimizer=optimizer, **{"dtype": "float32"} | settings)))
        return made[0]

    yield make
    for trainer in made:
        trainer.close()


def make_batch(lengths=(5, 17, 9, 16, 30, 2), *, seed=0, vocab=61):
    """Random sequences with weights that sum to 1 and a per-token target value."""
    from vime_megatron import TrainSequence

    generator = torch.Generator().manual_seed(seed)
    masks = [(torch.rand(n, generator=generator) < 0.7).float() for n in lengths]
    for mask in masks:
        mask[0], mask[-1] = 0.0, 1.0
    total = sum(float(mask.sum()) for mask in masks)
    return [
        TrainSequence(
            torch.randint(0, vocab, (n,), generator=generator),
            {
                "weight": mask / total,
                "advantage": torch.randn(n, generator=generator),
                "sequence": torch.full((n,), float(index)),
            },
        )
        for index, (n, mask) in enumerate(zip(lengths, masks, strict=True))
    ]


@pytest.fixture
def batch():
    """A batch of six uneven sequences."""
    return make_batch()


@pytest.fixture(scope="session")
def batch_of():
    """The batch maker itself."""
    return make_batch


@pytest.fixture(scope="session")
def gradients_of():
    """Compute the gradients of a step by name, without the loss scale; nothing is updated."""
    from vime_megatron import sft_loss

    def compute(trainer, batch):
        scale = trainer.state.loss_scale.value
        with trainer._platform.active():
            trainer._gradients(batch, trainer._plan(batch), sft_loss, scale)
        return {name: param.main_grad / scale for name, param in trainer.params.items()}

    return compute


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Run a job of ``rank_jobs.py`` on several processes; returns each rank's result.

    A fork server imports torch and Megatron once, so that a rank starts in a fraction of a second. Where there is a GPU
    ranks are spawned: Megatron's imports start the GPU's runtime, and after that a process must not fork.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(
            ["torch", "hypothesis", "vime_megatron", "vime_megatron.forward", "vime_megatron.optim"]
        )
    path = str(Path(__file__).with_name("rank_jobs.py"))

    def run(job: str, world: int, *, deadline: float = 120.0, **arguments):
        folder = tmp_path_factory.mktemp(job)
        processes = []
        for rank in range(world):
            order = {
                "job": job,
                "arguments": arguments,
                "rank": rank,
                "world_size": world,
                "init_method": f"file://{folder}/rendezvous",
                "out": str(folder / f"{rank}.pt"),
            }
            process = context.Process(target=runpy.run_path, args=(path, {"ORDER": order}, "rank"), daemon=True)
            process.start()
            processes.append(process)
        for process in processes:
            process.join(deadline)
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not alive, f"ranks {alive} did not finish in {deadline} s"
        assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]

    return run
