"""Policy losses as sums over tokens whose weights were normalised over the global batch.

A trainer calls :class:`PolicyLoss` once per packed micro-batch and adds the results over micro-batches and ranks. That
the sum does not depend on how the batch was cut rests on one rule: nothing here divides by a number of tokens or
samples. The field ``weight`` of each token, made by :func:`vime_grpo.batch.build_batch`, holds the loss mask and the
global normaliser already.

The objective of a token, to be maximised, with ratio ``r = exp(logprob - old_logprob)`` and advantage ``A``:

* ``clip``: ``min(r A, clip(r, 1 - low, 1 + high) A)``; with ``clip_dual = c`` and ``A < 0`` at least ``c A``;
* ``cispo``: ``stop_gradient(clip(r, 1 - low, 1 + high)) A logprob``: clipped tokens keep a gradient.

With ``ratio_level = "sequence"`` every token has its sequence's ratio, the exponential of the mean log ratio (GSPO,
arXiv:2507.18071). Samples that another policy drew are weighted as :mod:`vime_grpo.correction` describes.

Shapes: ``t`` tokens, flat over a micro-batch. Logprobs and entropy in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from vime_grpo.correction import CORRECTIONS, Level, check_bounds, check_level, importance_ratio
from vime_grpo.errors import BatchError, ConfigError
from vime_grpo.kl import KL_KINDS, LOG_RATIO_CLAMP, kl_penalty
from vime_grpo.registry import Registry, check_choice
from vime_grpo.segments import Segments

if TYPE_CHECKING:
    from vime_grpo.config import AlgorithmSection

Old = Literal["recompute", "rollout", "current"]
KlTarget = Literal["reference", "behaviour"]


@dataclass(frozen=True)
class ClipBounds:
    """Bounds of the ratio.

    Attributes:
        low: The ratio is clipped from below at ``1 - low``.
        high: The ratio is clipped from above at ``1 + high``; above ``low`` it is DAPO's "clip-higher".
        dual: Dual-clip bound for negative advantages, above 1; 0 for off.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0


Objective = Callable[[Tensor, Tensor, Tensor, ClipBounds], tuple[Tensor, Tensor]]
"""``(logprobs [t], log_ratio [t], advantage [t], bounds)`` -> (loss [t], whether the clip acts [t])."""

POLICY_LOSSES: Registry[Objective] = Registry("policy loss")


@POLICY_LOSSES.register(
    "clip",
    paper="Proximal Policy Optimization Algorithms, arXiv:1707.06347; separate bounds: DAPO, arXiv:2503.14476; dual "
    "clip: Mastering Complex Control in MOBA Games, arXiv:1912.09729",
)
def clipped_surrogate(
    logprobs_t: Tensor, log_ratio_t: Tensor, advantage_t: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate as a loss per token.

    Args:
        logprobs_t: Not used: the gradient flows through the ratio.
        log_ratio_t: ``logprob - old_logprob`` ``[t]``, with gradient.
        advantage_t: Advantages ``[t]``.
        bounds: Clip bounds.

    Returns:
        Loss ``[t]``, and where a clip acts ``[t]`` (bool): the token has no gradient there.
    """
    ratio_t = log_ratio_t.exp()
    plain_t = -ratio_t * advantage_t
    clipped_t = -ratio_t.clamp(1 - bounds.low, 1 + bounds.high) * advantage_t
    loss_t = torch.maximum(plain_t, clipped_t)
    acts_t = clipped_t > plain_t
    if bounds.dual > 0:
        bound_t = -bounds.dual * advantage_t
        dual_t = (advantage_t < 0) & (loss_t > bound_t)
        loss_t, acts_t = torch.where(dual_t, bound_t, loss_t), acts_t | dual_t
    return loss_t, acts_t


@POLICY_LOSSES.register("cispo", paper="MiniMax-M1: Scaling Test-Time Compute, arXiv:2506.13585")
def clipped_importance_weight(
    logprobs_t: Tensor, log_ratio_t: Tensor, advantage_t: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss per token: REINFORCE weighted by the clipped ratio.

    Args:
        logprobs_t: Logprobs in training ``[t]``, with gradient.
        log_ratio_t: ``logprob - old_logprob`` ``[t]``.
        advantage_t: Advantages ``[t]``.
        bounds: Clip bounds; ``dual`` does not apply.

    Returns:
        Loss ``[t]``, and where the ratio lies outside the bounds ``[t]`` (bool).
    """
    ratio_t = log_ratio_t.detach().exp()
    weight_t = ratio_t.clamp(1 - bounds.low, 1 + bounds.high)
    return -weight_t * advantage_t * logprobs_t, weight_t != ratio_t


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one micro-batch; a trainer's ``TokenLoss``. Immutable and picklable.

    Attributes:
        objective: Name in the registry of policy losses.
        bounds: Clip bounds.
        kl_coef: Weight of the KL penalty; 0 for none.
        kl_kind: Name in the registry of KL estimators.
        kl_target: Field that the penalty pulls towards: ``ref_logprob`` or the behaviour policy's.
        entropy_coef: Weight of the entropy bonus; 0 for none.
        old: Denominator of the ratio: ``recompute`` (field ``old_logprob``), ``rollout`` (``rollout_logprob``), or
            ``current`` (the present logprobs without gradient; right for the first update after a rollout only, where
            it equals ``recompute`` and saves a forward pass).
        ratio_level: Whether the clipped ratio is a token's, or the mean (in the logarithm) of its sequence.
        correction: Name in the registry of corrections.
        correction_level: Whether the corrected ratio is a token's, its sequence's product, or its geometric mean.
        correction_low: Lower bound of the correction.
        correction_high: Upper bound of the correction.
    """

    objective: str = "clip"
    bounds: ClipBounds = ClipBounds()
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    kl_target: KlTarget = "reference"
    entropy_coef: float = 0.0
    old: Old = "recompute"
    ratio_level: Literal["token", "sequence"] = "token"
    correction: str = "none"
    correction_level: Level = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0

    def __post_init__(self) -> None:
        """Look every name up, so that a wrong one fails here and is not taken for another in the first step.

        Raises:
            ConfigError: A name is unknown, or the correction would do nothing or drop what is on policy.
        """
        POLICY_LOSSES.get(self.objective)
        KL_KINDS.get(self.kl_kind)
        CORRECTIONS.get(self.correction)
        check_level(self.correction_level)
        check_level(self.ratio_level, ("token", "sequence"))
        check_choice("denominator of the ratio", self.old, get_args(Old))
        check_choice("target of the KL penalty", self.kl_target, get_args(KlTarget))
        if self.correction != "none" and self.old == "rollout":
            raise ConfigError(
                "a correction needs the trainer's logprobs in the ratio's denominator",
                seen=f'correction {self.correction!r} with old "rollout", where there is no ratio left to correct',
                expected='old "recompute" or "current"',
            )
        check_bounds(self.correction_low, self.correction_high)

    @classmethod
    def from_config(cls, algorithm: AlgorithmSection, *, reuse_current: bool = False) -> PolicyLoss:
        """Build the loss that a configuration describes.

        Args:
            algorithm: The section.
            reuse_current: Take the present logprobs for the old ones, instead of recomputed ones. Right only for a
                rollout's first update.
        """
        recompute = algorithm.old_logprobs == "recompute"
        return cls(
            objective=algorithm.policy_loss,
            bounds=ClipBounds(algorithm.clip_low, algorithm.clip_high, algorithm.clip_dual),
            kl_coef=algorithm.kl_coef,
            kl_kind=algorithm.kl_kind,
            kl_target=algorithm.kl_target,
            entropy_coef=algorithm.entropy_coef,
            old="current" if reuse_current and recompute else algorithm.old_logprobs,
            ratio_level=algorithm.ratio_level,
            correction=algorithm.correction,
            correction_level=algorithm.correction_level,
            correction_low=algorithm.correction_low,
            correction_high=algorithm.correction_high,
        )

    def __call__(
        self, logprobs_t: Tensor, entropy_t: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch, both as sums.

        Args:
            logprobs_t: Logprobs of the tokens ``[t]``, with gradient.
            entropy_t: Entropy of the distribution each token was predicted from ``[t]``.
            fields: ``weight``, ``advantage``, ``rollout_logprob`` and, as the settings need them, ``old_logprob``,
                ``ref_logprob`` and ``sequence``; ``[t]`` each. Tokens of weight 0 count nowhere, whatever their other
                values are.

        Returns:
            The loss, a scalar, and sums of weighted values by name. ``weight_sum`` is what the others are to be divided
            by to give means; :func:`vime_grpo.metrics.train_metrics` does.

        Raises:
            BatchError: A field is missing.
        """
        weight_t = _field(fields, "weight").to(logprobs_t.dtype)

        def trained(values_t: Tensor) -> Tensor:
            # Selecting, not multiplying by 0: a token outside the mask may hold anything, also NaN. `where` keeps the
            # shape, so no copy to the host is needed to learn how many tokens there are.
            return torch.where(weight_t != 0, values_t.to(logprobs_t.dtype), 0.0)

        logprobs_t, entropy_t = trained(logprobs_t), trained(entropy_t)
        advantage_t = trained(_field(fields, "advantage"))
        rollout_t = trained(_field(fields, "rollout_logprob"))
        if self.old == "recompute":
            old_t = trained(_field(fields, "old_logprob"))
        else:
            old_t = rollout_t if self.old == "rollout" else logprobs_t.detach()

        segments = None
        if self.ratio_level == "sequence" or self.correction_level != "token":
            segments = Segments.of(_field(fields, "sequence"), weight_t != 0)
        values = self._policy_term(logprobs_t, old_t, rollout_t, advantage_t, segments)
        values |= {"ppo_kl": old_t - logprobs_t, "entropy_loss": entropy_t}
        reference_t = logprobs_t if self.old == "rollout" else old_t
        values["train_rollout_logprob_abs_diff"] = (reference_t - rollout_t).abs()

        loss = (weight_t * values["pg_loss"]).sum()
        if self.kl_coef > 0:
            target_t = rollout_t if self.kl_target == "behaviour" else trained(_field(fields, "ref_logprob"))
            values["kl_loss"] = kl_penalty(logprobs_t, target_t, self.kl_kind)
            loss = loss + self.kl_coef * (weight_t * values["kl_loss"]).sum()
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * (weight_t * entropy_t).sum()
        sums = {name: (weight_t * value_t).sum().detach() for name, value_t in values.items()}
        sums["weight_sum"] = weight_t.sum()
        return loss, sums

    def _policy_term(
        self, logprobs_t: Tensor, old_t: Tensor, rollout_t: Tensor, advantage_t: Tensor, segments: Segments | None
    ) -> dict[str, Tensor]:
        """Return the corrected objective as ``pg_loss`` ``[t]``, and what its clip and its correction did."""
        log_ratio_t = logprobs_t - old_t
        if segments is not None and self.ratio_level == "sequence":
            log_ratio_t = segments.mean(log_ratio_t)
        log_ratio_t = log_ratio_t.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        pg_t, clipped_t = POLICY_LOSSES.get(self.objective)(logprobs_t, log_ratio_t, advantage_t, self.bounds)
        if self.correction == "none":
            return {"pg_loss": pg_t, "pg_clipfrac": clipped_t}
        ratio_t = importance_ratio(old_t, rollout_t, level=self.correction_level, segments=segments)
        factor_t = CORRECTIONS.get(self.correction)(ratio_t, self.correction_low, self.correction_high)
        return {
            "pg_loss": pg_t * factor_t,
            "pg_clipfrac": clipped_t,
            "tis": ratio_t,
            "tis_abs": (ratio_t - 1).abs(),
            "tis_clipfrac": factor_t != ratio_t,
            "tis_maskfrac": factor_t == 0,
        }


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise BatchError(
            f"the batch lacks the field {name!r}",
            seen=", ".join(sorted(fields)) or "no fields",
            fix="make rows with build_batch and hand it old_logprobs (ref_logprobs), or change algorithm.old_logprobs "
            "(kl_target)",
        )
    return fields[name]
