"""Group-relative advantages: how much better a sample is than the other answers to the same prompt.

GRPO needs no value network, because the rewards of the samples of one prompt are each other's baseline. Two invariants:

* a group is known by its identity, never by its place in the batch: samples may arrive in any order and groups may be
  of unequal size (samples are dropped, requests fail), and reshuffling the batch reshuffles the advantages;
* a group whose rewards are all equal teaches nothing: its advantages are exactly 0, not rounding noise divided by the
  small number that guards the division.

Shapes: ``n`` samples of one group, ``B`` samples of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from vime_grpo.errors import BatchError
from vime_grpo.registry import Registry

#: Added to the standard deviation before dividing, in units of the reward.
STD_EPSILON = 1e-6

Centre = Callable[[Tensor], Tensor]
"""Rewards of one group ``[n]`` -> rewards less their baseline ``[n]``."""

ADVANTAGES: Registry[Centre] = Registry("advantage estimator")


@ADVANTAGES.register("grpo", paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning, arXiv:2402.03300")
def centre_on_mean(rewards_n: Tensor) -> Tensor:
    """Subtract the group's mean.

    Args:
        rewards_n: Rewards of one group ``[n]``, float64.

    Returns:
        ``r_i - mean(r)`` ``[n]``.
    """
    return rewards_n - rewards_n.mean()


@ADVANTAGES.register("rloo", paper="Back to Basics: Revisiting REINFORCE-Style Optimization, arXiv:2402.14740")
def centre_on_others(rewards_n: Tensor) -> Tensor:
    """Subtract the mean of the group's other samples, an unbiased baseline.

    Args:
        rewards_n: Rewards of one group ``[n]``, float64.

    Returns:
        ``r_i - mean(r without r_i)`` ``[n]``, which is ``n / (n - 1)`` times the distance from the group's mean.
    """
    n = rewards_n.numel()
    return (rewards_n - rewards_n.mean()) * (n / (n - 1))


def group_advantages(
    rewards: Sequence[float] | Tensor,
    group_ids: Sequence[Hashable],
    *,
    estimator: str = "grpo",
    normalize_std: bool = True,
) -> Tensor:
    """Return one advantage per sample, computed within its group.

    With ``normalize_std`` the centred rewards are divided by the group's standard deviation (of a sample, that is with
    ``n - 1``) plus 1e-6. Without it they keep the reward's unit, as in Dr. GRPO (arXiv:2503.20783), which found that
    the division favours prompts that are nearly always or nearly never solved.

    Args:
        rewards: Rewards ``[B]``, finite.
        group_ids: Identity of each sample's group, length B, in any order.
        estimator: Name in the registry: ``grpo`` or ``rloo``.
        normalize_std: Divide by the standard deviation.

    Returns:
        Advantages ``[B]``, float32. 0 for groups of one and for groups whose rewards are all equal.

    Raises:
        BatchError: Lengths differ, or a reward is not finite.
        ConfigError: There is no such estimator.
    """
    centre = ADVANTAGES.get(estimator)
    rewards_b = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards_b.dim() != 1 or rewards_b.numel() != len(group_ids):
        raise BatchError(
            "rewards do not match group ids",
            seen=f"rewards {tuple(rewards_b.shape)}, {len(group_ids)} group ids",
            expected="one reward and one group id per sample",
        )
    if bad := (~torch.isfinite(rewards_b)).nonzero().flatten().tolist():
        where = f"sample {bad[0]} of group {group_ids[bad[0]]!r}"
        raise BatchError("a reward is not finite", where=where, seen=str(float(rewards_b[bad[0]])))

    members: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_ids):
        members.setdefault(group, []).append(position)

    advantages_b = torch.zeros_like(rewards_b)
    for positions in members.values():
        rewards_n = rewards_b[positions]
        if rewards_n.numel() < 2 or bool((rewards_n == rewards_n[0]).all()):
            continue
        centred_n = centre(rewards_n)
        if normalize_std:
            centred_n = centred_n / (rewards_n.std(correction=1) + STD_EPSILON)
        advantages_b[positions] = centred_n
    return advantages_b.float()
