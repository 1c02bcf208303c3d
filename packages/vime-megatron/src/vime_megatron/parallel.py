"""Process groups of one trainer, and where its rank stands in them.

Megatron keeps its groups in module globals, so a process holds one trainer at a time; :meth:`Topology.close` makes room
for the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import HashStore  # type: ignore[attr-defined]

from vime_megatron.config import TrainerConfig
from vime_megatron.errors import TrainerError
from vime_megatron.families.mapping import Layout, check_layout
from vime_megatron.families.shape import ModelShape
from vime_megatron.peers import Peers


@dataclass(frozen=True)
class Topology:
    """The groups of this process.

    Attributes:
        layout: What this rank holds.
        layouts: What every rank holds, by global rank.
        dp_size: Data-parallel ranks, context parallelism left out.
        dp_rank: This rank's place among them.
        cp_size: Context-parallel ranks, which share each row.
        cp_rank: This rank's place among them.
        cp_group: Context-parallel group, or ``None`` when it has one rank.
        tp_group: Tensor-parallel group, or ``None`` when it has one rank.
        rank: Global rank.
        world_size: Number of ranks.
        timeout_s: Deadline of collective operations, in seconds.
    """

    layout: Layout
    layouts: tuple[Layout, ...]
    dp_size: int
    dp_rank: int
    cp_size: int
    cp_rank: int
    cp_group: Any
    tp_group: Any
    rank: int
    world_size: int
    timeout_s: float

    @property
    def counts_once(self) -> bool:
        """This rank's loss is one of those whose sum is the global one; tensor and context twins repeat it."""
        return self.layout.last_stage and self.layout.tp_rank == 0 and self.cp_rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Collect one small value from every rank, in rank order."""
        return self.peers.gather(value)

    @property
    def peers(self) -> Peers:
        """All ranks, in the group of the trainer's steps."""
        return Peers(self.rank, self.world_size)

    def background_peers(self) -> Peers:
        """Return all ranks in a group of its own, for a thread that must not meet a step's collectives.

        Every rank must call it, in the trainer's thread; the group is made once.
        """
        return Peers(self.rank, self.world_size, self._background_group)

    @cached_property
    def _background_group(self) -> Any:
        if self.world_size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather(None)

    def from_last_stage(self, value: Any) -> Any:
        """Hand the last pipeline stage's value to the other stages of its pipeline."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return value
        carried = [value]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(carried, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return carried[0]

    @staticmethod
    def close() -> None:
        """Leave all groups."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(
    config: TrainerConfig,
    shape: ModelShape,
    *,
    rank: int,
    world_size: int,
    init_method: str | None,
    backend: str,
) -> Topology:
    """Join the process group and build Megatron's groups.

    Args:
        config: Parallel sizes and the deadline.
        shape: The model, for the split of layers.
        rank: Global rank.
        world_size: Number of ranks.
        init_method: Rendezvous; may be ``None`` for one rank.
        backend: Communication backend.

    Returns:
        The topology.

    Raises:
        TrainerError: The sizes do not fit the world, a trainer already lives in this process, or there is no
        rendezvous.
    """
    _check_world(config, rank=rank, world_size=world_size, init_method=init_method)
    check_layout(
        shape,
        config.tensor_parallel,
        config.pipeline_parallel,
        config.expert_parallel,
        config.context_parallel,
        whole_experts=config.whole_experts,
    )
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=config.timeout_s)}
    if init_method is None:
        options["store"] = HashStore()
    else:
        options["init_method"] = init_method
    dist.init_process_group(backend, **options)
    parallel_state.initialize_model_parallel(
        config.tensor_parallel,
        config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor_parallel,
        distributed_timeout_minutes=config.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    return _describe(config, shape, rank, world_size)


def _check_world(config: TrainerConfig, *, rank: int, world_size: int, init_method: str | None) -> None:
    if not 0 <= rank < world_size:
        raise TrainerError("bad rank", seen=f"rank {rank} of {world_size}", expected=f"0 to {world_size - 1}")
    if world_size > 1 and init_method is None:
        raise TrainerError("no rendezvous", seen="init_method=None", expected="an address such as tcp://host:port")
    if dist.is_initialized() or parallel_state.model_parallel_is_initialized():
        raise TrainerError(
            "this process already has process groups", where=f"rank {rank}", fix="close the other trainer first"
        )
    config.check_world(world_size)


def _describe(config: TrainerConfig, shape: ModelShape, rank: int, world_size: int) -> Topology:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    layers = shape.layers // config.pipeline_parallel
    experts = shape.experts // config.expert_parallel
    layout = Layout(
        rank=rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=config.tensor_parallel,
        first_layer=pp_rank * layers,
        layers=layers,
        first_stage=parallel_state.is_pipeline_first_stage(),
        last_stage=parallel_state.is_pipeline_last_stage(),
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        first_expert=parallel_state.get_expert_model_parallel_rank() * experts,
        experts=experts,
        whole_experts=config.whole_experts,
    )
    layouts: list[Any] = [layout]
    if world_size > 1:
        layouts = [None] * world_size
        dist.all_gather_object(layouts, layout)
    return Topology(
        layout=layout,
        layouts=tuple(layouts),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=config.context_parallel,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_group=parallel_state.get_context_parallel_group() if config.context_parallel > 1 else None,
        tp_group=parallel_state.get_tensor_model_parallel_group() if config.tensor_parallel > 1 else None,
        rank=rank,
        world_size=world_size,
        timeout_s=config.timeout_s,
    )
