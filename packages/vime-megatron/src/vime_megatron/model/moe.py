"""A mixture of gated feed-forwards, the experts of a rank stacked in two parameters.

Each token goes to the ``k`` experts that a router likes best and adds up their outputs by the router's weights (Shazeer
et al., arXiv 1701.06538; the softmax over all experts before the choice is Qwen3's, arXiv 2505.09388). Nothing is
dropped: every expert takes all tokens that chose it. There is no auxiliary loss: the router learns from the policy loss
alone.

The stacks hold ``[gate; up]`` of one expert after the other, which is the memory of vLLM's ``w13`` (``[x, 2f, m]``) and
``w2`` (``[x, m, f]``). Tensor parallelism splits each expert's width, expert parallelism gives each rank whole experts
and moves the tokens: sorted by expert, sent to the rank that has it, and back again. With whole experts beside split
attention (``expert_tensor_parallel = 1``) each tensor-parallel rank routes the tokens that sequence parallelism gives
it, and expert parallelism may span those ranks too.

Suffixes: ``s`` tokens of this rank, ``t`` tokens of the tensor-parallel group's row, ``k`` choices of a token, ``n``
token-expert pairs sorted by expert, ``r`` pairs received, ``x`` experts, ``f`` an expert's width on this rank, ``m``
width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from vime_megatron.kernels import PLAIN, Kernels

GROUPED = "one grouped product"


def route(logits_sx: Tensor, chosen: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits_sx: The router's output ``[s, x]``.
        chosen: Experts per token.
        normalise: Scale the weights of the chosen to sum to 1.

    Returns:
        Weights, in the type of the logits but computed in float32, and expert numbers; ``[s, k]`` both.
    """
    weights_sk, experts_sk = logits_sx.softmax(-1, dtype=torch.float32).topk(chosen, dim=-1)
    if normalise:
        weights_sk = weights_sk / weights_sk.sum(-1, keepdim=True)
    return weights_sk.to(logits_sx.dtype), experts_sk


def expert_product(device: torch.device, dtype: torch.dtype) -> str:
    """Say how the experts' matrices are multiplied: all in one kernel (torch 2.10 and later), or one after the other.

    Args:
        device: Where they are.
        dtype: Their type.

    Returns:
        For :attr:`MegatronTrainer.choices`.
    """
    able = device.type == "cuda" and dtype is torch.bfloat16 and hasattr(F, "grouped_mm")
    return GROUPED if able else "one product each"


def expert_matmul(rows_nm: Tensor, stack_xfm: Tensor, counts: list[int]) -> Tensor:
    """Multiply each expert's rows by the transpose of its matrix.

    Args:
        rows_nm: Rows sorted by expert.
        stack_xfm: One matrix per expert.
        counts: Rows of each expert; they sum to ``n``.

    Returns:
        ``[n, f]``.
    """
    if expert_product(rows_nm.device, rows_nm.dtype) == GROUPED:
        return grouped_matmul(rows_nm, stack_xfm, counts)
    pairs = zip(torch.split(rows_nm, counts), stack_xfm.unbind(0), strict=True)
    return torch.cat([rows @ matrix.t() for rows, matrix in pairs])


def grouped_matmul(rows_nm: Tensor, stack_xfm: Tensor, counts: list[int]) -> Tensor:
    """Do the same in one kernel (torch 2.10 and later); arguments as :func:`expert_matmul`."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows_nm.device)
    out_nf: Tensor = F.grouped_mm(rows_nm, stack_xfm.transpose(1, 2), offs=ends)
    return out_nf


class Router(torch.nn.Module):
    """The matrix that scores experts; whole on every rank.

    Args:
        config: Megatron's configuration.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """Create the weight ``[x, m]``."""
        super().__init__()
        self.weight = _parameter(config, int(config.num_moe_experts or 0), config.hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_sm: Tensor) -> Tensor:
        """Score ``[s, m]``; returns ``[s, x]``."""
        return F.linear(x_sm, self.weight)


class MixtureOfExperts(MegatronModule):
    """Router and experts of one layer.

    Args:
        config: Megatron's configuration; ``moe_router_pre_softmax`` says that weights are not normalised.

    Attributes:
        kernels: What computes the activation.
    """

    kernels: Kernels = PLAIN

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        """Create the router and this rank's stacks."""
        super().__init__(config=config)
        self._ranks = config.expert_model_parallel_size
        self.experts = int(config.num_moe_experts or 0)
        self.local_experts = self.experts // self._ranks
        split = config.expert_tensor_parallel_size
        self._whole = split < config.tensor_model_parallel_size
        self.width = int(config.moe_ffn_hidden_size or 0) // split
        self.router = Router(config)
        self.experts_fc1 = _parameter(config, self.local_experts * 2 * self.width, config.hidden_size)
        self.experts_fc2 = _parameter(config, self.local_experts * config.hidden_size, self.width)
        alike = self._ranks == 1 and not self._whole  # as many twins as the rest of the model has
        for stack in (self.experts_fc1, self.experts_fc2):
            stack.allreduce = alike  # type: ignore[attr-defined]  # Megatron: else reduced over the experts' own twins

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Transform ``[s, 1, m]``; returns the same shape, and no bias."""
        x_sm = hidden_states.squeeze(1)
        weights_sk, experts_sk = route(
            self.router(x_sm), self.config.moe_router_topk, normalise=not self.config.moe_router_pre_softmax
        )
        if self._whole:
            return self._mix(x_sm, weights_sk, experts_sk).unsqueeze(1), None
        if self.config.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            x_tm, weights_tk, experts_tk = gather(x_sm), gather(weights_sk), gather(experts_sk)
        else:
            copy = tensor_parallel.copy_to_tensor_model_parallel_region
            x_tm, weights_tk, experts_tk = copy(x_sm), copy(weights_sk), experts_sk
        out_tm = self._mix(x_tm, weights_tk, experts_tk)
        if self.config.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(out_tm).unsqueeze(1), None
        return tensor_parallel.reduce_from_tensor_model_parallel_region(out_tm).unsqueeze(1), None

    def _mix(self, x_tm: Tensor, weights_tk: Tensor, experts_tk: Tensor) -> Tensor:
        """Sort the pairs by expert, run them, and add up each token's; no atomics, so the sum's order is fixed."""
        order_n = experts_tk.flatten().argsort(stable=True)
        counts_x = torch.bincount(experts_tk.flatten(), minlength=self.experts)
        x_nm = x_tm[order_n // experts_tk.shape[1]]
        y_nm = self._run(x_nm, counts_x.tolist()) if self._ranks == 1 else self._exchange(x_nm, counts_x)
        y_tkm = y_nm[_inverse(order_n)].view(*experts_tk.shape, -1)
        return (y_tkm * weights_tk[..., None]).sum(1)

    def _exchange(self, x_nm: Tensor, counts_x: Tensor) -> Tensor:
        """Send pairs to the ranks that have their experts, run them there, and return the results."""
        group = parallel_state.get_expert_model_parallel_group()
        gathered = [torch.empty_like(counts_x) for _ in range(self._ranks)]
        dist.all_gather(gathered, counts_x, group=group)
        first = group.rank() * self.local_experts
        sent = counts_x.view(self._ranks, self.local_experts).sum(1).tolist()
        arriving = torch.stack(gathered)[:, first : first + self.local_experts]  # [ranks, experts here]
        received = arriving.sum(1).tolist()
        x_rm = tensor_parallel.all_to_all(group, x_nm, received, sent)
        ids = torch.arange(self.local_experts, device=counts_x.device).repeat(self._ranks)
        order_r = ids.repeat_interleave(arriving.flatten()).argsort(stable=True)  # from rank-major to expert-major
        y_rm = self._run(x_rm[order_r], arriving.sum(0).tolist())
        out_nm: Tensor = tensor_parallel.all_to_all(group, y_rm[_inverse(order_r)], sent, received)
        return out_nm

    def _run(self, x_nm: Tensor, counts: list[int]) -> Tensor:
        """Run this rank's experts on rows sorted by expert."""
        stacked_n2f = expert_matmul(
            x_nm, self.experts_fc1.view(self.local_experts, -1, self.experts_fc1.shape[1]), counts
        )
        act_nf = self.kernels.gated_silu(stacked_n2f)
        return expert_matmul(act_nf, self.experts_fc2.view(self.local_experts, -1, self.experts_fc2.shape[1]), counts)


def _parameter(config: TransformerConfig, rows: int, columns: int) -> torch.nn.Parameter:
    device = torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))


def _inverse(order_n: Tensor) -> Tensor:
    return torch.empty_like(order_n).scatter_(0, order_n, torch.arange(order_n.numel(), device=order_n.device))
