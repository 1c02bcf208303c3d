"""What a rank will hold on its device, before anything is started.

Weights, gradients and optimiser state are exact: they are counted from the same placements that the trainer is built
from. Activations are an estimate for a full micro-batch: what each matrix product, norm and attention keeps for the
backward pass; for a 1.7B model on an H200 the sum was 2% above the measured peak. The device's context, the matrix
libraries' workspaces and fragmentation are a stated reserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vime_megatron.config import TrainerConfig
from vime_megatron.families import load_family
from vime_megatron.families.mapping import Layout, check_layout, placements
from vime_megatron.families.shape import ModelShape

RESERVE_BYTES = 2 * 2**30
FRAGMENTATION = 1.05


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device of the fullest rank.

    Attributes:
        parameters: Parameters of the whole model.
        weights: Weights of the rank.
        gradients: Float32 gradient sums.
        optimizer: Float32 masters (where weights are not float32) and two moments.
        activations: Kept for the backward pass of one micro-batch; an estimate.
        vocabulary: A block of logits, and the embedding's own gradient before it is added; an estimate.
        reserve: Context and workspaces; an assumption.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    vocabulary: int
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        """Peak of a step, fragmentation included."""
        state = self.weights + self.gradients + self.optimizer
        return int((state + self.activations + self.vocabulary) * FRAGMENTATION) + self.reserve


def plan_memory(config: TrainerConfig, *, world_size: int = 1) -> MemoryPlan:
    """Estimate a trainer's memory.

    Args:
        config: What the trainer will be given; only ``config.json`` of its model is read.
        world_size: Number of ranks.

    Returns:
        The plan of the pipeline stage that holds most.

    Raises:
        ModelError: The model is not supported or does not divide by the parallel sizes.
        TrainerError: The parallel sizes do not divide the ranks.
    """
    config.check_world(world_size)
    family, shape = load_family(config.model)
    stages, experts = config.pipeline_parallel, config.expert_parallel
    whole = config.whole_experts
    check_layout(shape, config.tensor_parallel, stages, experts, config.context_parallel, whole_experts=whole)
    replicas = world_size // (config.tensor_parallel * stages)
    plans = []
    for stage in range(stages):
        layout = Layout(
            tp_size=config.tensor_parallel,
            first_layer=stage * (shape.layers // stages),
            layers=shape.layers // stages,
            first_stage=stage == 0,
            last_stage=stage == stages - 1,
            experts=shape.experts // experts,
            whole_experts=whole,
        )
        shared = expert = 0
        for place in placements(family.rules, shape, layout):
            size = prod(stop - start for start, stop in place.local)
            if ".experts_fc" in place.param:
                expert += size
            else:
                shared += size
        plans.append(_stage_plan(config, shape, layout, shared, expert, replicas))
    return max(plans, key=lambda plan: plan.total)


def _stage_plan(
    config: TrainerConfig, shape: ModelShape, layout: Layout, shared: int, expert: int, replicas: int
) -> MemoryPlan:
    width = 4 if config.dtype == "float32" else 2
    per_parameter = 8 if config.dtype == "float32" else 12
    spread = replicas if config.optimizer.distributed else 1
    shared_by = config.tensor_parallel if config.whole_experts and config.optimizer.distributed else 1
    expert_spread = max(1, spread * shared_by // config.expert_parallel)
    vocabulary = 0
    if layout.last_stage:
        rows = -(-shape.vocab // layout.tp_size)
        fused = config.dtype != "float32" and config.kernels != "torch"
        each = 4 if config.head_dtype == "float32" else width
        logits = config.logprob_chunk_tokens * rows * (each if fused else 3 * 4)  # plain torch has three, in float32
        embedding = rows * shape.hidden * width if shape.tied else 0  # its gradient, as autograd returns it
        vocabulary = logits + embedding
    in_flight = config.pipeline_parallel if layout.first_stage else 1  # micro-batches between forward and backward
    return MemoryPlan(
        parameters=count_parameters(shape),
        weights=(shared + expert) * width,
        gradients=(shared + expert) * 4,
        optimizer=per_parameter * (shared // spread + expert // expert_spread),
        activations=in_flight * _activations(config, shape, layout.layers, width),
        vocabulary=vocabulary,
    )


def _activations(config: TrainerConfig, shape: ModelShape, layers: int, width: int) -> int:
    """Bytes that one micro-batch's layers keep."""
    tp = config.tensor_parallel
    residual = shape.hidden / (tp if config.sequence_parallel else 1)
    q, kv = shape.heads * shape.head_dim / tp, shape.kv_heads * shape.head_dim / tp
    chosen = shape.experts_per_token or 1
    normed, activated = 2 * residual, chosen * shape.ffn / tp
    kept = 2 * residual + 2 * (q + 2 * kv) + q + 2 * chosen * shape.ffn / tp
    if shape.experts:
        kept += 2 * chosen * residual  # the sorted copies of each token, in and out
    if config.recompute != "selective":
        kept += normed + activated
    tokens = config.max_tokens_per_microbatch / config.context_parallel
    if config.recompute == "full":
        return int(tokens * width * (layers * residual + kept))
    return int(tokens * width * layers * kept)


def count_parameters(shape: ModelShape) -> int:
    """Return the model's number of parameters, a tied projection counted once."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    feed_forward = 3 * shape.hidden * shape.ffn * (shape.experts or 1) + shape.hidden * shape.experts
    layer = shape.hidden * (2 * q + 2 * kv + 2) + feed_forward
    layer += (q + 2 * kv) * shape.qkv_bias + 2 * shape.head_dim * shape.qk_norm
    return shape.layers * layer + shape.hidden + shape.vocab * shape.hidden * (1 if shape.tied else 2)
