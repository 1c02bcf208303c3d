"""The steps in plain torch: the definition of what the fused kernels compute.

Suffixes: ``t`` tokens, ``f`` width of the feed-forward, ``x`` stacked rows ``[q; k; v]`` of this rank, ``h`` query
heads, ``g`` key/value heads, ``e`` width of a head, ``d`` half of it, ``c`` tokens of a chunk, ``v`` vocabulary rows of
this rank, ``m`` width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_COPIED_ROWS = 8192  # of a second factor, in float32 at one time: 134 MB at width 4096


@dataclass(frozen=True)
class HeadLayout:
    """How a stacked projection is cut into heads.

    Attributes:
        heads: Query heads of this rank.
        groups: Key/value heads of this rank.
        width: Width of a head.
        eps: Added to the mean square of the head norms.
    """

    heads: int
    groups: int
    width: int
    eps: float


class AddNorm(Protocol):
    """Sum and norm."""

    def __call__(self, x_tm: Tensor, added_tm: Tensor | None, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum."""


@dataclass(frozen=True, slots=True)
class AdamWState:
    """One parameter's tensors, all of one shape.

    Attributes:
        master: The parameter in float32.
        grad: Its gradient, float32; read only.
        mean: First moment.
        square: Second moment.
        weight: The model's parameter in half precision, or ``None`` where the master is the model's.
    """

    master: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    weight: Tensor | None


@dataclass(frozen=True, slots=True)
class AdamWTerms:
    """Settings of one update of a group of parameters.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        eps: Added to the deviation.
        decay: Decoupled weight decay.
        factor: Gradients are multiplied by this as they are read (clipping, and one over the loss scale).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    factor: float


class QueryKeyValue(Protocol):
    """Split, norm and rotate."""

    def __call__(
        self,
        qkv_tx: Tensor,
        q_weight_e: Tensor | None,
        k_weight_e: Tensor | None,
        cos_td: Tensor,
        sin_td: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``q_the``, ``k_tge`` and ``v_tge``."""


class VocabStatistics(Protocol):
    """Softmax statistics of this rank's logits."""

    def __call__(self, logits_cv: Tensor, rows_c: Tensor, scale: float) -> Tensor:
        """Return peak, mass, moment and target ``[4, c]``; may overwrite the logits."""


class VocabGradient(Protocol):
    """Gradient with respect to this rank's logits."""

    def __call__(
        self,
        logits_cv: Tensor,
        rows_c: Tensor,
        scale: float,
        logsum_c: Tensor,
        entropy_c: Tensor,
        grad_logprob_c: Tensor,
        grad_entropy_c: Tensor,
    ) -> Tensor:
        """Return the gradient in the logits' type; may overwrite the logits."""


def add_norm(x_tm: Tensor, added_tm: Tensor | None, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and norm it (RMS norm, arXiv 1910.07467).

    Args:
        x_tm: The residual stream ``[..., m]``.
        added_tm: What a block of the model adds, or ``None``.
        weight_m: Weight of the norm.
        eps: Added to the mean square.

    Returns:
        The normed sum, and the sum for those further down the stream, in the type of ``x_tm``.
    """
    sum_tm = x_tm if added_tm is None else x_tm + added_tm
    return norm(sum_tm, weight_m, eps), sum_tm


def norm(x_tm: Tensor, weight_m: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last axis, statistics in float32."""
    return F.rms_norm(x_tm, weight_m.shape, weight_m, eps)


def gated_silu(x_t2f: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (GLU variants, arXiv 2002.05202).

    Args:
        x_t2f: ``[gate; up]`` along the last axis.

    Returns:
        ``[..., f]``.
    """
    gate, up = x_t2f.chunk(2, dim=-1)
    return F.silu(gate) * up


def _wide(x: Tensor) -> torch.dtype:
    """Return the type to add up in: float32, or float64 for those who check derivatives in it."""
    return torch.promote_types(x.dtype, torch.float32)


def rotate(x_the: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + e/2])`` by its position's angle (RoFormer, arXiv 2104.09864), in float32.

    Args:
        x_the: Queries or keys ``[t, h, e]``.
        cos_td: Cosines of the angles.
        sin_td: Sines.

    Returns:
        The rotated tensor, in the type of ``x_the``.
    """
    wide = _wide(x_the)
    cos, sin = cos_td[:, None, :].to(wide), sin_td[:, None, :].to(wide)
    left, right = x_the.to(wide).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_the.dtype)


def query_key_value(
    qkv_tx: Tensor,
    q_weight_e: Tensor | None,
    k_weight_e: Tensor | None,
    cos_td: Tensor,
    sin_td: Tensor,
    layout: HeadLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a stacked projection into heads; norm and rotate queries and keys.

    Args:
        qkv_tx: ``[t, (heads + 2 groups) * width]``.
        q_weight_e: Weight of the query heads' RMS norm, or ``None`` for no norm.
        k_weight_e: Weight of the key heads' RMS norm, likewise.
        cos_td: Cosines of the rotary angles, float32.
        sin_td: Sines.
        layout: How to cut.

    Returns:
        ``q_the``, ``k_tge``, ``v_tge``.
    """
    width = layout.width
    sizes = [layout.heads * width, layout.groups * width, layout.groups * width]
    q_the, k_tge, v_tge = (x.view(*x.shape[:-1], -1, width) for x in torch.split(qkv_tx, sizes, dim=-1))
    if q_weight_e is not None:
        q_the = F.rms_norm(q_the, (width,), q_weight_e, layout.eps)
    if k_weight_e is not None:
        k_tge = F.rms_norm(k_tge, (width,), k_weight_e, layout.eps)
    return rotate(q_the, cos_td, sin_td), rotate(k_tge, cos_td, sin_td), v_tge


def vocab_statistics(logits_cv: Tensor, rows_c: Tensor, scale: float) -> Tensor:
    """Reduce each row ``z = scale * logits`` to what its softmax needs, in float32 (float64 for float64 logits).

    Args:
        logits_cv: Unscaled logits.
        rows_c: Column of the target, or -1 where another rank holds it.
        scale: One over the temperature.

    Returns:
        ``[4, c]``: ``peak = max z``, ``mass = sum exp(z - peak)``, ``moment = sum exp(z - peak) (z - peak)``, and the
        target's ``z`` (0 where another rank holds it).
    """
    z_cv = logits_cv.to(_wide(logits_cv)) * scale
    target_c = z_cv.gather(1, rows_c.clamp(min=0)[:, None]).squeeze(1).where(rows_c >= 0, 0.0)
    peak_c = z_cv.amax(dim=-1)
    z_cv.sub_(peak_c[:, None])
    exp_cv = z_cv.exp()
    return torch.stack((peak_c, exp_cv.sum(dim=-1), exp_cv.mul_(z_cv).sum(dim=-1), target_c))


def vocab_gradient(
    logits_cv: Tensor,
    rows_c: Tensor,
    scale: float,
    logsum_c: Tensor,
    entropy_c: Tensor,
    grad_logprob_c: Tensor,
    grad_entropy_c: Tensor,
) -> Tensor:
    """Return the gradient of ``grad_logprob * logprob + grad_entropy * entropy`` with respect to the unscaled logits.

    Args:
        logits_cv: Unscaled logits, as in the forward pass.
        rows_c: Column of the target, or -1 where another rank holds it.
        scale: One over the temperature.
        logsum_c: ``logsumexp`` of the scaled logits over all ranks.
        entropy_c: Entropy over all ranks.
        grad_logprob_c: Incoming gradient of the log-probabilities.
        grad_entropy_c: Incoming gradient of the entropies.

    Returns:
        ``[c, v]`` in the logits' type.
    """
    logp_cv = logits_cv.to(_wide(logits_cv)).mul(scale).sub_(logsum_c[:, None])
    p_cv = logp_cv.exp()
    # -p (g_logprob + g_entropy (log p + H)), then + g_logprob at the target
    factor_cv = logp_cv.add_(entropy_c[:, None]).mul_(grad_entropy_c[:, None]).add_(grad_logprob_c[:, None])
    grad_cv = p_cv.mul_(factor_cv).neg_()
    at_target_c = grad_logprob_c.where(rows_c >= 0, 0.0)
    grad_cv.scatter_add_(1, rows_c.clamp(min=0)[:, None], at_target_c[:, None])
    return grad_cv.mul_(scale).to(logits_cv.dtype)


def adamw(states: Sequence[AdamWState], corrections_n2: Tensor, terms: AdamWTerms) -> None:
    """Update masters, moments and weights in place (decoupled weight decay, arXiv 1711.05101).

    Args:
        states: The parameters of one group.
        corrections_n2: For each of them ``1 - beta1^k`` and ``sqrt(1 - beta2^k)``, ``k`` the number of this update.
        terms: The group's settings.
    """
    for state, (mean_correction, deviation_correction) in zip(states, corrections_n2.unbind(), strict=True):
        grad = state.grad * terms.factor
        state.mean.mul_(terms.beta1).add_(grad, alpha=1 - terms.beta1)
        state.square.mul_(terms.beta2).addcmul_(grad, grad, value=1 - terms.beta2)
        deviation = state.square.sqrt().div_(deviation_correction).add_(terms.eps)
        state.master.mul_(1 - terms.lr * terms.decay)
        state.master.sub_(terms.lr / mean_correction * state.mean / deviation)
        if state.weight is not None:
            state.weight.copy_(state.master)


def product(a_cm: Tensor, b_vm: Tensor) -> Tensor:
    """Return ``a b^T`` in float32 from half-precision factors, through float32 copies of a few rows of ``b`` at a time.

    Args:
        a_cm: First factor.
        b_vm: Second factor.

    Returns:
        ``[c, v]``, float32; products of half-precision numbers are exact in it, so only the order of sums is open.
    """
    wide_cm = a_cm.float()
    out_cv = wide_cm.new_empty(len(a_cm), len(b_vm))
    for start in range(0, len(b_vm), _COPIED_ROWS):
        span = slice(start, start + _COPIED_ROWS)
        torch.mm(wide_cm, b_vm[span].float().t(), out=out_cv[:, span])
    return out_cv


def product_wide(a_cm: Tensor, b_vm: Tensor) -> Tensor:
    """Like :func:`product`, but the matrix library reads half precision and writes float32: no copies (torch 2.8)."""
    return torch.mm(a_cm, b_vm.t(), out_dtype=torch.float32)


def wide_products_work(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Tell whether this torch can multiply in half precision into float32 there, by doing it once.

    Args:
        device: A GPU.
        dtype: Type of the factors.

    Returns:
        Whether :func:`product_wide` gave the right product.
    """

    def agrees() -> Tensor:
        factor = torch.full((64, 64), 1 + 2.0**-7, device=device, dtype=dtype)
        # The product is 2^-8 above 65, where bfloat16 has steps of 2^-1 and float16 of 2^-4.
        return (product_wide(factor, factor) - 64 * (1 + 2.0**-7) ** 2).abs() < 1e-3

    return _library_has(torch.ops.aten.mm, "dtype", agrees)


def accumulate(sum_vm: Tensor, a_cv: Tensor, b_cm: Tensor) -> None:
    """Add ``a^T b`` to a float32 sum; the product itself is rounded to the factors' type.

    Args:
        sum_vm: Float32, changed in place.
        a_cv: First factor.
        b_cm: Second factor.
    """
    sum_vm += a_cv.t() @ b_cm


def accumulate_wide(sum_vm: Tensor, a_cv: Tensor, b_cm: Tensor) -> None:
    """Like :func:`accumulate`, but the matrix library adds into the float32 sum: no rounding, no extra pass."""
    torch.ops.aten.addmm.dtype_out(sum_vm, a_cv.t(), b_cm, torch.float32, out=sum_vm)


def wide_sums_work(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Tell whether this torch can multiply in half precision and add in float32 there, by doing it once.

    Args:
        device: A GPU.
        dtype: Type of the factors.

    Returns:
        Whether :func:`accumulate_wide` gave the right sum.
    """

    def agrees() -> Tensor:
        sum_vm = torch.ones(64, 64, device=device)
        factor = torch.eye(64, device=device, dtype=dtype)
        accumulate_wide(sum_vm, factor, factor)
        return sum_vm == 1 + torch.eye(64, device=device)

    return _library_has(torch.ops.aten.addmm, "dtype_out", agrees)


def _library_has(operation: Any, overload: str, agrees: Callable[[], Tensor]) -> bool:
    """Tell whether this torch has an overload of an operation, and the matrix library of its build the numbers."""
    if not hasattr(operation, overload):
        return False
    try:
        return bool(agrees().all())
    except RuntimeError:  # the library does not have it
        return False
