"""How old the tokens of a batch are, and what that means for metrics and masks.

The lag of a token is the version of the weights that train on it minus the version that sampled it. Tokens of lag 0 are
*on policy*: trainer and engine computed their log-probabilities with the same weights, so a difference there is a
difference of kernels and must not grow; for older tokens a difference is what training changed.

Shapes: ``S`` tokens of a sample, ``t`` tokens of a packed micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from vime_grpo import PolicyLoss
from vime_rollout import Sample

from vime_integration.errors import PipelineError

#: Per-token field of a row: 1 where the token was sampled by the weights that train on it.
ON_POLICY = "on_policy"
#: Mean absolute difference between trainer's and engine's log-probabilities of on-policy tokens, nats.
ON_POLICY_DIFFERENCE = "train/on_policy_logprob_abs_diff"
_SUM, _WEIGHT = "on_policy_abs_diff_sum", "on_policy_weight_sum"


def on_policy_field(sample: Sample, version: int) -> Tensor:
    """Return 1 ``[S]`` where a token of ``sample`` was sampled by weights of ``version``, else 0."""
    values_s = torch.zeros(len(sample.tokens))
    for span in sample.versions:
        if span.version == version:
            values_s[sample.prompt_length + span.start : sample.prompt_length + span.end] = 1.0
    return values_s


def check_lag(samples: Sequence[Sample], version: int, max_lag: int) -> None:
    """Refuse tokens that are older than allowed, or newer than the trainer.

    Raises:
        PipelineError: Names the sample and its versions.
    """
    for sample in samples:
        where = f"sample {sample.index} of group {sample.group_id}"
        if sample.reward is None:
            raise PipelineError("a sample was not scored", where=where, expected="a reward")
        seen = sorted({span.version for span in sample.versions})
        if seen and not version - max_lag <= seen[0] <= seen[-1] <= version:
            allowed = str(version) if max_lag == 0 else f"{version - max_lag} to {version}"
            raise PipelineError(
                "a sample was made under other weights than may be trained on",
                where=where,
                seen=f"versions {seen}",
                expected=f"version {allowed} for every token",
                fix="this is a fault of the pipeline or of an engine that somebody else updates: report it",
            )


def lag_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Return ``rollout/lag/*``.

    Mean and largest lag of a sample's oldest token, how many samples have which lag and how many span versions,
    and the share of tokens that are older than the trainer's weights.
    """
    lags = [version - oldest for sample in samples if (oldest := sample.oldest_version) is not None]
    spans = [span for sample in samples for span in sample.versions]
    tokens = sum(span.end - span.start for span in spans)
    old = sum(span.end - span.start for span in spans if span.version != version)
    metrics = {
        "rollout/lag/mean": fmean(lags) if lags else 0.0,
        "rollout/lag/max": float(max(lags, default=0)),
        "rollout/lag/off_policy_token_ratio": old / tokens if tokens else 0.0,
        "rollout/lag/mixed_samples": float(sum(len({s.version for s in sample.versions}) > 1 for sample in samples)),
    }
    return metrics | {f"rollout/lag/samples_{lag}": float(n) for lag, n in sorted(Counter(lags).items())}


@dataclass(frozen=True)
class WithOnPolicyDifference:
    """A policy loss that also measures the difference to the engine on on-policy tokens; a trainer's ``TokenLoss``.

    Attributes:
        loss: What is minimised.
    """

    loss: PolicyLoss

    def __call__(
        self, logprobs_t: Tensor, entropy_t: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its sums, with two more: the weighted difference on on-policy tokens, and their weight.

        Raises:
            BatchError: A field is missing.
        """
        loss, sums = self.loss(logprobs_t, entropy_t, fields)
        if ON_POLICY in fields:
            before_t = fields.get("old_logprob", logprobs_t).detach()
            weight_t = fields["weight"] * fields[ON_POLICY]
            difference_t = torch.where(weight_t != 0, (before_t - fields["rollout_logprob"]).abs(), 0.0)
            sums |= {_SUM: (weight_t * difference_t).sum(), _WEIGHT: weight_t.sum()}
        return loss, sums


def settle_on_policy(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the two sums, as a step's metrics hold them, into ``train/on_policy_logprob_abs_diff``.

    A batch without on-policy tokens has no such metric: there is nothing to compare.
    """
    total, weight = metrics.pop(f"train/{_SUM}", 0.0), metrics.pop(f"train/{_WEIGHT}", 0.0)
    return metrics | ({ON_POLICY_DIFFERENCE: total / weight} if weight > 0 else {})
