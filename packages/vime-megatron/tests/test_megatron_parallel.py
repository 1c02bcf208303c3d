"""Layouts give the result of one rank: losses, gradients, weights, logprobs, exports and regions.

Between processes of a CPU (gloo), and between two GPUs (NCCL or RCCL) where there are two.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

# A large eps makes AdamW's update proportional to the gradient, so that equal weights after a step mean equal
# gradients; with the usual one an update is close to the gradient's sign, and rounding decides it where that is near 0.
OPTIMIZER = {"lr": 0.3, "eps": 1.0, "clip_grad": 0.5, "weight_decay": 0.1}
WHOLE_EXPERTS = {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1}
LAYOUTS = {
    "tp2": (2, {"tensor_parallel": 2}),
    "dp2": (2, {"max_tokens_per_microbatch": 20}),  # one rank has a micro-batch more
    "dp2-distributed": (2, {}),
    "tp2-sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2, "max_tokens_per_microbatch": 40}),
    "cp2": (2, {"context_parallel": 2, "max_tokens_per_microbatch": 40}),
    "cp2-distributed": (2, {"context_parallel": 2}),
    "tp2-cp2-sequence": (
        4,
        {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True, "recompute": "selective"},
    ),
    "cp2-pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "cp4": (4, {"context_parallel": 4}),
    "cp2-ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "whole-experts": (2, WHOLE_EXPERTS),
    "whole-experts-ep2-distributed": (2, WHOLE_EXPERTS | {"expert_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2, "max_tokens_per_microbatch": 20}),
    "ep2-distributed": (2, {"expert_parallel": 2}),
    "tp2-pp2-sequence": (
        4,
        {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    ),
    "tp2-ep2": (4, {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}),
    "tp2-dp2-sequence-distributed": (4, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2-ep2-distributed": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "max_tokens_per_microbatch": 20}),
    "pp2-dp2-distributed": (4, {"pipeline_parallel": 2, "max_tokens_per_microbatch": 20}),
}


CASES = [
    *(
        ("qwen3", layout)
        for layout, (world, _) in LAYOUTS.items()
        if world == 2 and not {"ep2", "experts"} & set(layout.split("-"))
    ),
    ("qwen3-tied", "pp2"),
    ("qwen2", "cp4"),
    ("qwen3-moe", "cp2-ep2"),
    ("qwen3-moe", "whole-experts"),
    ("qwen3-moe", "whole-experts-ep2-distributed"),
    ("llama", "tp2-cp2-sequence"),
    ("qwen3-tied", "cp2-pp2"),
    ("qwen2", "tp2"),
    ("qwen3-moe", "tp2"),
    ("qwen3-moe", "tp2-sequence"),
    ("qwen3-moe", "ep2"),
    ("qwen3-moe", "ep2-distributed"),
    ("qwen3-moe", "tp2-ep2"),
    ("llama", "tp2-pp2-sequence"),
    ("qwen3-tied", "pp2-dp2-distributed"),
    ("qwen3-tied", "tp2-dp2-sequence-distributed"),
    ("qwen3-moe", "pp2-ep2-distributed"),
]


# What two GPUs can show; the layouts of four ranks differ from these in how they are combined.
PAIRS = [(kind, layout) for kind, layout in CASES if LAYOUTS[layout][0] == 2]


@pytest.fixture(scope="module")
def reference_of(ranks, model_of, tmp_path_factory):
    """One rank's two steps on a model and a device, once for all layouts."""
    made = {}

    def get(kind: str, device: str):
        if (kind, device) not in made:
            export = tmp_path_factory.mktemp("reference") / "hf"
            [result] = ranks(
                "train",
                1,
                model=str(model_of(kind)),
                settings={"device": device},
                optimizer=OPTIMIZER,
                export=str(export),
            )
            exported = load_file(export / "model.safetensors")
            before = load_file(model_of(kind) / "model.safetensors")
            for name, tensor in exported.items():
                assert (tensor - before[name]).abs().max() > 1e-4, name  # or the comparison would say little
            made[kind, device] = result | {"export": exported}
        return made[kind, device]

    return get


@pytest.fixture
def check_layout(ranks, model_of, tmp_path, reference_of):
    """Train in a layout and compare everything with one rank on the same kind of device."""

    def check(kind: str, layout: str, device: str) -> None:
        world, settings = LAYOUTS[layout]
        optimizer = OPTIMIZER | {"distributed": layout.endswith("distributed")}
        export, save = str(tmp_path / "hf"), str(tmp_path / "saved")
        reference, model, settings = reference_of(kind, device), str(model_of(kind)), settings | {"device": device}
        results = ranks("train", world, model=model, settings=settings, optimizer=optimizer, export=export, save=save)
        for result in results:
            for name in ("loss", "grad_norm", "entropy"):
                assert result[name] == pytest.approx(reference[name], rel=1e-5), name
            assert result["tokens"] == reference["tokens"]
        exported = load_file(tmp_path / "hf" / "model.safetensors")
        assert exported.keys() == reference["export"].keys()
        for name, tensor in exported.items():
            torch.testing.assert_close(tensor, reference["export"][name], rtol=1e-4, atol=1e-5)
        _check_logprobs(layout, [result["logprobs"] for result in results], reference["logprobs"])
        _check_regions(results, exported)

    return check


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_layout_equals_one_rank(check_layout, kind, layout):
    check_layout(kind, layout, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_two_gpus_equal_one(check_layout, kind, layout):
    check_layout(kind, layout, "cuda")


def _check_logprobs(layout, shards, reference):
    """The data-parallel ranks' shards are apart, and together one rank's log-probabilities."""
    merged = {index: values for shard in shards for index, values in shard.items()}
    assert merged.keys() == reference.keys()
    if layout.startswith(("dp2", "ep2", "pp2-ep2")) or "-dp2" in layout:
        assert not shards[0].keys() & shards[-1].keys()
    for index, values in merged.items():
        torch.testing.assert_close(values, reference[index], rtol=1e-4, atol=2e-4)


def _check_regions(results, exported):
    """All ranks' regions together hold every element of every exported tensor, bit for bit."""
    for name, tensor in exported.items():
        seen = torch.zeros(tensor.shape, dtype=torch.bool)
        for result in results:
            for start, part in result["pieces"].get(name, []):
                where = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                assert torch.equal(tensor[where], part), name
                seen[where] = True
        assert seen.all(), name


def test_ranks_save_behind_a_step_and_agree_when_one_cannot(ranks, tiny, tmp_path):
    results = ranks("background", 2, model=str(tiny), folder=str(tmp_path / "saved"))
    for result in results:
        assert result["found"] == result["wanted"]
        assert len(result["said"]) == 2
        for said in result["said"]:
            assert "rank 1" in said
            assert "stays valid" in said
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("layout", ["pp2", "dp2", "tp2-ep2"])
def test_a_loss_that_raises_on_one_rank_ends_the_step_on_all(ranks, model_of, layout):
    world, settings = LAYOUTS[layout]
    model = str(model_of("qwen3-moe" if "ep2" in layout else "qwen3"))
    settings = settings | {"max_tokens_per_microbatch": 20}
    results = ranks("failing", world, model=model, settings=settings)
    *others, failed = results
    assert failed["said"] == "ValueError: there is no such field"
    for result in others:
        assert result["said"].startswith("TrainerError: the loss has failed on another rank (rank ")
        assert f"rank {world - 1} of {world}" in result["said"]
        assert "ValueError: there is no such field; fix: weights and optimiser are unchanged" in result["said"]
    undisturbed = ranks("train", world, model=model, settings=settings, optimizer={"lr": 1e-2})[0]
    for result in results:
        assert result["done"] == 0
        assert result["losses"] == list(zip(undisturbed["loss"], undisturbed["grad_norm"], strict=True))


def test_what_one_rank_cannot_do_ends_on_all(ranks, tiny, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((tiny / "config.json").read_bytes())
    first, second = ranks("one_rank_cannot", 2, model=str(tiny), empty=str(empty), folder=str(tmp_path))
    assert "not every rank can read the model" in first["said"][0]
    assert "rank 1: no weights in the model folder" in first["said"][0]
    assert second["said"][0].startswith("no weights in the model folder")
    for result in (first, second):
        assert "nothing was published" in result["said"][1]
        assert "rank 0: " in result["said"][1]
    assert "not every rank can read the checkpoint" in first["said"][2]
    assert "rank 1: no valid checkpoint" in first["said"][2]
    assert second["said"][2].startswith("no valid checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "saved"]
