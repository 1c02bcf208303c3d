"""From scored samples to training rows: alignment of per-token values, and the one place where a loss is normalised.

Alignment. ``fields[name][i]`` belongs to the prediction OF ``tokens[i]``; token 0 is predicted by nothing. With prompt
length P and response length R (S = P + R) the response's values fill positions P to S - 1, and the prompt's are 0::

    tokens    [ p0 ... p(P-1) | r0 ... r(R-1) ]
    weight    [ 0  ...  0     | w  ...  w     ]     0 also where the loss mask is 0

Normalisation. The weight of a trained token is its share of the global batch of one optimiser step. A trainer only adds
weighted values, so neither micro-batches, nor packing, nor data parallelism can change the loss or its gradient. With
T_i trained tokens in sample i and N samples that have any:

=========== ===================== ===================================================================================
aggregation weight                meaning
=========== ===================== ===================================================================================
sample_mean ``1 / (N T_i)``       every sample counts alike (GRPO, arXiv:2402.03300)
token_mean  ``1 / sum_j T_j``     every token counts alike (DAPO, arXiv:2503.14476)
horizon     ``1 / (N horizon)``   sums over tokens, one constant (Dr. GRPO, arXiv:2503.20783): no reward for length
=========== ===================== ===================================================================================

Tokens that another policy sampled may be left out (``on_policy``). Their weight is 0, and T_i and N are counted as if
it were not: leaving tokens out must not make the others count more, or steps would grow as their data gets staler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import NoReturn, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from vime_grpo.errors import BatchError
from vime_grpo.registry import Registry

Aggregation = Callable[[Tensor, int], Tensor]
"""``(trained tokens per sample [B], horizon)`` -> weight of one trained token of each sample ``[B]``."""

AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


class SampleLike(Protocol):
    """What a batch is made from; vime-rollout's ``Sample`` fits as it is, and so does :class:`TrainSample`."""

    @property
    def group_id(self) -> str:
        """Identity of the group."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and response, ids, length S."""

    @property
    def prompt_length(self) -> int:
        """P, at least 1."""

    @property
    def loss_mask(self) -> Sequence[int]:
        """0 or 1 per response token, length R."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The engine's logprob of each response token, length R, nats."""

    @property
    def reward(self) -> float | None:
        """The score."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A plain :class:`SampleLike`, for use without vime-rollout.

    Attributes:
        group_id: Identity of the group.
        tokens: Prompt and response, ids, length S.
        prompt_length: P, at least 1.
        loss_mask: 0 or 1 per response token, length R = S - P.
        logprobs: The engine's logprob of each response token, length R, nats.
        reward: The score.
    """

    group_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class BatchRow:
    """One training sequence.

    Attributes:
        tokens: Token ids ``[S]``, int64.
        fields: Per-token values ``[S]``, float32: ``weight``, ``advantage``, ``rollout_logprob``, ``sequence`` (the
            row's number in the batch, from 1, at every token) and, when given, ``old_logprob`` and ``ref_logprob``.
    """

    tokens: Tensor
    fields: dict[str, Tensor]


class BatchRows(Sequence[BatchRow]):
    """The rows of a batch, kept end to end; a row is made of views when it is asked for.

    Thousands of short tensors take longer to make, to send and to look at than the training of a small model.

    Args:
        lengths: Tokens of each row, S.
        tokens: Ids of all rows end to end ``[t]``, int64.
        fields: Per-token values likewise, ``[t]`` each.

    Raises:
        BatchError: A field is not as long as the rows together.
    """

    def __init__(self, lengths: Sequence[int], tokens: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Keep the tensors as they are."""
        self.lengths = list(lengths)
        self.tokens = tokens
        self.fields = dict(fields)
        self._ends = list(accumulate(self.lengths))
        total = self._ends[-1] if self._ends else 0
        for name, values_t in {"tokens": tokens, **self.fields}.items():
            if values_t.shape != (total,):
                seen = f"shape {tuple(values_t.shape)}"
                raise BatchError("a field does not fit the rows", where=name, seen=seen, expected=f"({total},)")

    @classmethod
    def of(cls, rows: Sequence[BatchRow]) -> BatchRows:
        """Lay rows end to end; they have the same fields, as the trainer asks of a batch."""
        if isinstance(rows, BatchRows):
            return cls(rows.lengths, rows.tokens, rows.fields)
        if not rows:
            return cls([], torch.zeros(0, dtype=torch.int64), {})
        fields = {name: torch.cat([row.fields[name] for row in rows]) for name in rows[0].fields}
        return cls([len(row.tokens) for row in rows], torch.cat([row.tokens for row in rows]), fields)

    @classmethod
    def join(cls, parts: Sequence[BatchRows]) -> BatchRows:
        """Return the rows of several batches with the same fields, at least one, as one."""
        first = parts[0]
        if len(parts) == 1:
            return first
        fields = {name: torch.cat([part.fields[name] for part in parts]) for name in first.fields}
        lengths = [length for part in parts for length in part.lengths]
        return cls(lengths, torch.cat([part.tokens for part in parts]), fields)

    def with_fields(self, **more: Sequence[Tensor]) -> BatchRows:
        """Return the rows with further fields.

        Args:
            more: Values ``[S]`` of each row, by name.
        """
        return BatchRows(
            self.lengths, self.tokens, self.fields | {name: torch.cat(list(values)) for name, values in more.items()}
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @overload
    def __getitem__(self, position: int) -> BatchRow: ...
    @overload
    def __getitem__(self, position: slice) -> list[BatchRow]: ...
    def __getitem__(self, position: int | slice) -> BatchRow | list[BatchRow]:
        """Return a row, whose tensors are views of the batch's."""
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        end = self._ends[position]
        span = slice(end - self.lengths[position], end)
        return BatchRow(self.tokens[span], {name: values_t[span] for name, values_t in self.fields.items()})

    def __iter__(self) -> Iterator[BatchRow]:
        """Iterate over the rows, which costs less than asking for each."""
        parts = [torch.split(values_t, self.lengths) for values_t in (self.tokens, *self.fields.values())]
        for tokens, *values in zip(*parts, strict=True):
            yield BatchRow(tokens, dict(zip(self.fields, values, strict=True)))


@AGGREGATIONS.register("sample_mean", paper="DeepSeekMath, arXiv:2402.03300")
def sample_mean(trained_b: Tensor, horizon: int) -> Tensor:
    """Return ``1 / (N T_i)``."""
    return 1.0 / (trained_b.clamp(min=1) * (trained_b > 0).sum())


@AGGREGATIONS.register("token_mean", paper="DAPO, arXiv:2503.14476")
def token_mean(trained_b: Tensor, horizon: int) -> Tensor:
    """Return ``1 / sum_j T_j``, the same for every sample."""
    return torch.ones_like(trained_b) / trained_b.sum()


@AGGREGATIONS.register("horizon", paper="Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783")
def over_horizon(trained_b: Tensor, horizon: int) -> Tensor:
    """Return ``1 / (N horizon)``, the same for every sample."""
    return torch.ones_like(trained_b) / ((trained_b > 0).sum() * horizon)


def build_batch(
    samples: Sequence[SampleLike],
    advantages: Sequence[float] | Tensor,
    *,
    aggregation: str = "sample_mean",
    horizon: int | None = None,
    old_logprobs: Mapping[int, Tensor] | Sequence[Tensor] | None = None,
    ref_logprobs: Mapping[int, Tensor] | Sequence[Tensor] | None = None,
    on_policy: Sequence[Sequence[int]] | None = None,
) -> BatchRows:
    """Make the global batch of ONE optimiser step.

    Args:
        samples: The samples of this step; normalisation is over all of them.
        advantages: One per sample ``[B]``, see :func:`vime_grpo.advantages.group_advantages`.
        aggregation: Name in the registry of aggregations.
        horizon: Longest response in tokens, for the aggregation ``horizon``.
        old_logprobs: The trainer's logprobs before the update, by position in ``samples``, ``[S]`` each.
        ref_logprobs: The reference model's logprobs, likewise.
        on_policy: By sample, 0 or 1 per response token, length R: tokens of 0 get weight 0, and the others keep
            theirs. None trains on all of the loss mask.

    Returns:
        One row per sample, in order. A sample without trained tokens gives a row of weight 0.

    Raises:
        BatchError: A sample's lengths do not fit, values are not finite, or there is nothing to train on.
        ConfigError: There is no such aggregation.
    """
    advantages_b = torch.as_tensor(advantages, dtype=torch.float32)
    if advantages_b.shape != (len(samples),) or not bool(torch.isfinite(advantages_b).all()):
        seen = f"shape {tuple(advantages_b.shape)}"
        raise BatchError("bad advantages", seen=seen, expected=f"{len(samples)} finite values, one per sample")
    for position, sample in enumerate(samples):
        _check(sample, position)
    weights_b = token_weights([sum(sample.loss_mask) for sample in samples], aggregation, horizon)
    kept = None if on_policy is None else [_kept(on_policy, i, sample) for i, sample in enumerate(samples)]
    long = _long_fields(samples, advantages_b, weights_b, kept)
    tokens_t = _tensor(chain.from_iterable(sample.tokens for sample in samples), np.int64)
    rows = BatchRows([len(sample.tokens) for sample in samples], tokens_t, long)
    for name, source in (("old_logprob", old_logprobs), ("ref_logprob", ref_logprobs)):
        if source is not None:
            rows = rows.with_fields(**{name: [_given(source, i, sample, name) for i, sample in enumerate(samples)]})
    if on_policy is not None and not bool(long["weight"].any()):
        raise BatchError(
            "nothing to train on",
            seen="every trained token is off policy, and those are masked",
            fix="turn rollout.mask_off_policy off and correct them (algorithm.correction), or lower "
            "pipeline.max_weight_lag",
        )
    return rows


def _long_fields(
    samples: Sequence[SampleLike], advantages_b: Tensor, weights_b: Tensor, kept: Sequence[Sequence[int]] | None
) -> dict[str, Tensor]:
    """Return the fields of all rows laid end to end ``[t]``: many short tensors would take ten times as long."""
    row_t = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(s.tokens) for s in samples]))
    mask_t = _end_to_end(samples, [sample.loss_mask for sample in samples])
    logprob_t = _end_to_end(samples, [sample.logprobs for sample in samples])
    if not bool(torch.isfinite(logprob_t).all()):
        _not_finite(samples, int(row_t[~torch.isfinite(logprob_t)][0]))
    weight_t = mask_t * weights_b[row_t]
    return {
        "weight": weight_t if kept is None else weight_t * _end_to_end(samples, kept),
        "advantage": (mask_t != 0) * advantages_b[row_t],
        "rollout_logprob": logprob_t,
        # Whole numbers are exact in float32 up to 2**24, far above the samples of a step.
        "sequence": (row_t + 1).float(),
    }


def token_weights(trained: Sequence[int], aggregation: str, horizon: int | None = None) -> Tensor:
    """Return the weight of one trained token of each sample.

    Args:
        trained: Trained tokens per sample, length B.
        aggregation: Name in the registry.
        horizon: For the aggregation ``horizon``.

    Returns:
        Weights ``[B]``, float32, computed in float64.

    Raises:
        BatchError: No sample has a trained token, or the horizon is missing.
        ConfigError: There is no such aggregation.
    """
    weigh = AGGREGATIONS.get(aggregation)
    if not any(trained):
        raise BatchError(
            "nothing to train on", seen=f"{len(trained)} samples without trained tokens", expected="at least one"
        )
    if aggregation == "horizon" and (horizon is None or horizon < 1):
        raise BatchError("the aggregation 'horizon' needs a horizon", seen=repr(horizon), expected="at least 1")
    return weigh(torch.tensor(trained, dtype=torch.float64), horizon or 1).float()


def split_updates(group_ids: Sequence[Hashable], updates: int) -> list[list[int]]:
    """Divide a rollout's samples over its optimiser steps, never cutting a group.

    Args:
        group_ids: Identity of each sample's group, in any order.
        updates: Optimiser steps.

    Returns:
        Positions of each step's samples. Groups are dealt in order of first appearance; their numbers differ by at
        most one.

    Raises:
        BatchError: There are fewer groups than steps.
    """
    groups: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_ids):
        groups.setdefault(group, []).append(position)
    if not 1 <= updates <= len(groups):
        raise BatchError(
            "not enough groups for the optimiser steps",
            seen=f"{len(groups)} groups for {updates} steps",
            expected="at least one group a step",
            fix="lower algorithm.steps_per_rollout or raise rollout.batch_size",
        )
    members = list(groups.values())
    share, more = divmod(len(members), updates)
    parts, start = [], 0
    for step in range(updates):
        end = start + share + (step < more)
        parts.append([position for group in members[start:end] for position in group])
        start = end
    return parts


def _check(sample: SampleLike, position: int) -> None:
    response = len(sample.tokens) - sample.prompt_length
    where = f"sample {position}, group {sample.group_id!r}"
    if sample.prompt_length < 1 or response < 0:
        seen = f"prompt_length {sample.prompt_length}, {len(sample.tokens)} tokens"
        raise BatchError("bad prompt length", where=where, seen=seen, expected="1 to the number of tokens")
    for name in ("loss_mask", "logprobs"):
        if len(getattr(sample, name)) != response:
            seen, expected = f"{len(getattr(sample, name))} values", f"{response}, one per response token"
            raise BatchError(f"{name} does not match the response", where=where, seen=seen, expected=expected)
    if not set(sample.loss_mask) <= {0, 1}:
        raise BatchError("loss_mask holds other values than 0 and 1", where=where, seen=str(set(sample.loss_mask)))


def _not_finite(samples: Sequence[SampleLike], position: int) -> NoReturn:
    raise BatchError(
        "an engine's logprob is not finite",
        where=f"sample {position}, group {samples[position].group_id!r}",
        fix="see the engine's log; such tokens cannot be trained on",
    )


def _end_to_end(samples: Sequence[SampleLike], values: Sequence[Sequence[float]]) -> Tensor:
    """Return response values ``[R]`` of each sample as rows ``[S]``, 0 over the prompt, laid end to end."""
    pairs = zip(samples, values, strict=True)
    return _tensor(chain.from_iterable(chain(repeat(0.0, s.prompt_length), own) for s, own in pairs), np.float32)


def _tensor(values: Iterable[float], kind: type[np.float32] | type[np.int64]) -> Tensor:
    """Return Python numbers as a tensor, by way of numpy: torch takes three to six times as long for each."""
    return torch.from_numpy(np.fromiter(values, kind))


def _kept(on_policy: Sequence[Sequence[int]], position: int, sample: SampleLike) -> Sequence[int]:
    where = f"on_policy of sample {position}, group {sample.group_id!r}"
    if position >= len(on_policy) or len(on_policy[position]) != len(sample.tokens) - sample.prompt_length:
        seen = f"{len(on_policy[position])} values" if position < len(on_policy) else f"{len(on_policy)} samples"
        raise BatchError(
            "on_policy does not match the response",
            where=where,
            seen=seen,
            expected=f"{len(sample.tokens) - sample.prompt_length} values, one per response token",
        )
    if not set(on_policy[position]) <= {0, 1}:
        raise BatchError("on_policy holds other values than 0 and 1", where=where, seen=str(set(on_policy[position])))
    return on_policy[position]


def _given(source: Mapping[int, Tensor] | Sequence[Tensor], position: int, sample: SampleLike, name: str) -> Tensor:
    where = f"{name} of sample {position}, group {sample.group_id!r}"
    try:
        values_s = source[position]
    except (KeyError, IndexError) as error:
        raise BatchError("logprobs are missing", where=where, seen=f"{len(source)} given") from error
    if values_s.shape != (len(sample.tokens),):
        seen, expected = f"shape {tuple(values_s.shape)}", f"one value per token, ({len(sample.tokens)},)"
        raise BatchError("logprobs do not match the tokens", where=where, seen=seen, expected=expected)
    values_s = values_s.detach().to("cpu", torch.float32)
    trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
    if not bool(torch.isfinite(values_s[sample.prompt_length :][trained]).all()):
        raise BatchError("a logprob is not finite", where=where, fix="the model's weights or its input are broken")
    return values_s
