"""Which phase of a run fits into the memory it will find, before anything is started; whoever does not fit is named.

The trainer's part is vime-megatron's plan: exact for weights, gradients and optimiser, an estimate for activations. The
engine's part is what vLLM takes: ``engine.gpu_memory_utilization`` of a whole GPU, whatever it needs, so two questions
are asked of it. Does its share hold its weights, one whole context of KV cache and a reserve? And does the share fit
beside what the trainer leaves? With ``engine.kv_cache_gib`` it takes a cache of that size and what it needs beside it,
which is less than its share.

On a GPU that trainer and engine share, a phase is the sum of what both hold then. `vime_integration.sharing` decides
who gives back what (nobody, where an asynchronous run shares devices)::

    rollout          the engine's share, the trainer's weights; where it does not offload, gradients and optimiser too
    train            the trainer's peak, and the engine's share: its context only where it sleeps
    update_weights   the trainer's whole state, and the engine's share: its weights only where it slept

What the trainer holds is what it has allocated. Its allocator keeps more after a step (of the 8B shape on two H200 110
GiB reserved, 69 allocated), so where little of the device is free (`actors.trainer.ENOUGH_GIB`) it returns what is
unused before engines generate, whether state leaves too or not; some 2% stay in blocks that are partly used. Engines
allocate for their batches as they go, each within its share.

An engine that runs on the trainer's memory has no weights of its own. One that somebody else started is where he put
it, and only the trainer is asked about.

On a CPU every process lives side by side in one memory, so there is one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime_grpo import RunConfig
from vime_megatron import ModelShape
from vime_megatron.memory import MemoryPlan, count_parameters

from vime_integration.placement import apart

GIB = 2**30
CONTEXT = 1 * GIB  # of a process on a GPU: runtime, kernels, libraries' workspaces. An assumption.
ENGINE_RESERVE = 2 * GIB  # activations and graphs of an engine beside weights and KV cache. An assumption.
# The same with its context, where no share bounds it. Of the 8B shape on an H200 5.7 GiB were neither cache nor the
# trainer's allocator's; the trainer's own context and communicators are among them.
ENGINE_BESIDE_CACHE = 5 * GIB
CPU_PROCESS = 1 * GIB  # resident memory of a Python process that has imported torch and vLLM. An assumption.
CPU_ENGINE_PROCESSES = 2  # server and, without fast start, engine core
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PhaseNeed:
    """What one phase wants of one memory.

    Attributes:
        name: The phase, as the metrics name it.
        parts: Bytes by owner, in the order of the text.
        budget: Bytes that there are.
        fix: What makes it smaller.
    """

    name: str
    parts: Mapping[str, int]
    budget: int
    fix: str

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the budget holds them."""
        return self.total <= self.budget

    def text(self) -> str:
        """Return the parts and their sum, in GiB."""
        parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items() if size)
        return f"{parts} = {self.total / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who gives back what on a GPU that trainer and engine share.

    Attributes:
        sleeps: Engines give their memory back while the trainer works.
        offloads: The trainer gives gradients and optimiser back while engines generate.
        aliased: Engines run on the trainer's weights.
    """

    sleeps: bool
    offloads: bool
    aliased: bool


def kv_bytes_per_token(shape: ModelShape, config: RunConfig) -> int:
    """Return the bytes that one token takes in one rank's KV cache.

    Key and value of every layer; where there are fewer key-value heads than ranks, each rank holds one.
    """
    heads = max(1, shape.kv_heads // config.engine.tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * WIDTHS[config.engine.dtype]


def engine_weights(shape: ModelShape, config: RunConfig) -> int:
    """Return the bytes of one engine rank's weights; tensors that are not split are counted as if they were."""
    return count_parameters(shape) * WIDTHS[config.engine.dtype] // config.engine.tensor_parallel


def gpu_needs(
    config: RunConfig, plan: MemoryPlan, shape: ModelShape, device_bytes: int, sharing: Sharing
) -> list[PhaseNeed]:
    """Return what each phase needs of one GPU.

    Args:
        config: The run.
        plan: The trainer's memory on its fullest rank.
        shape: The model.
        device_bytes: Memory of the smallest visible GPU.
        sharing: Who gives back what; without meaning where trainer and engines are apart.
    """
    engine = config.engine
    smaller = "raise trainer.tensor_parallel, set trainer.activation_recompute, or lower max_tokens_per_microbatch"
    training = PhaseNeed("train", {"trainer": plan.total}, device_bytes, smaller)
    if not engine.count:
        return [training]
    weights = 0 if sharing.aliased else engine_weights(shape, config)
    needs = _engine_needs(config, shape, weights, int(engine.gpu_memory_utilization * device_bytes))
    share = needs[0].budget if engine.kv_cache_gib is None else needs[0].total
    if apart(config):
        return [*needs, training]
    state = CONTEXT + plan.weights + plan.gradients + plan.optimizer
    kept = CONTEXT + plan.weights if sharing.offloads else state
    asleep = CONTEXT if sharing.sleeps else share
    beside = 'lower engine.gpu_memory_utilization, set engine.sleep = "on", or spread both over more GPUs'
    alone = plan.total + CONTEXT > device_bytes  # then no other share of the engine helps
    phases = (
        ("rollout", {"engine's share": share, "trainer keeps": kept}, beside),
        ("train", {"trainer": plan.total, "engine keeps": asleep}, smaller if sharing.sleeps or alone else beside),
        ("update_weights", {"trainer holds": state, "engine holds": asleep + weights * sharing.sleeps}, beside),
    )
    return [*needs, *(PhaseNeed(name, parts, device_bytes, fix) for name, parts, fix in phases)]


def _engine_needs(config: RunConfig, shape: ModelShape, weights: int, share: int) -> list[PhaseNeed]:
    """Return what must fit into the engine's share, first of all, and into a cache whose size was chosen."""
    engine = config.engine
    context = (engine.max_model_len or config.rollout.max_context_tokens) * kv_bytes_per_token(shape, config)
    one = {"one context of KV cache": context}
    larger = "raise engine.gpu_memory_utilization or engine.tensor_parallel"
    if engine.kv_cache_gib is None:
        inside = {"weights": weights, **one, "reserve": ENGINE_RESERVE}
        return [PhaseNeed("engine", inside, share, larger)]
    cache = int(engine.kv_cache_gib * GIB)
    inside = {"weights": weights, "KV cache": cache, "reserve": ENGINE_BESIDE_CACHE}
    return [
        PhaseNeed("engine", inside, share, f"lower engine.kv_cache_gib, {larger}"),
        PhaseNeed("engine cache", one, cache, "raise engine.kv_cache_gib or engine.tensor_parallel"),
    ]


def cpu_needs(config: RunConfig, plan: MemoryPlan, shape: ModelShape, host_bytes: int) -> list[PhaseNeed]:
    """Return what a run on a CPU needs of the host's memory; every process is there all the time.

    Args:
        config: The run.
        plan: The trainer's memory on its fullest rank.
        shape: The model.
        host_bytes: Memory that is available.
    """
    ranks, engines = config.trainer.world_size, config.engine.count * config.engine.tensor_parallel
    trainer = plan.total - plan.reserve
    engine = engine_weights(shape, config) + int(config.engine.cpu_kv_cache_gib * GIB)
    staged = count_parameters(shape) * WIDTHS[config.trainer.dtype]
    processes = ranks + engines * CPU_ENGINE_PROCESSES + 2  # driver and rollout
    parts = {
        "trainer ranks": ranks * trainer,
        "engines": engines * engine,
        "staged weights": staged,
        f"{processes} processes": processes * CPU_PROCESS,
    }
    return [PhaseNeed("all phases", parts, host_bytes, "lower engine.kv_cache_gib or max_tokens_per_microbatch")]
