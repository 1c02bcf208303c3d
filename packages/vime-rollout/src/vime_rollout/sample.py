"""Prompts, samples and groups: what generation hands to training.

Token layout of a ``Sample`` with prompt length P and response length R (S = P + R)::

    tokens      [ p0 p1 ... p(P-1) | r0 r1 ... r(R-1) ]      length S
    loss_mask                      [ m0 m1 ... m(R-1) ]      length R, 1 = sampled and trained on
    logprobs                       [ l0 l1 ... l(R-1) ]      length R, under the distribution sampled from
    versions                       [ span ) [ span ) ...     spans over 0..R, each with its weight version

Invariants, checked in the constructor and therefore true of every ``Sample`` that exists:

* the three response-long sequences have exactly R entries, and 0 < P <= S;
* spans are ordered, do not overlap and lie within 0..R; every token with ``loss_mask`` 1 lies in a span (a token that
  no version is known for cannot be trained on);
* logprobs are finite and at most 0 (beyond rounding).

A sample is immutable. Scoring makes a new one, and can be done once: what was scored is what is trained on. Tokens are
the ids that the engine sampled; they are never made again from text, because decoding and encoding do not round-trip.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vime_rollout.errors import SampleError

#: How far above 0 a logprob may lie: log-softmax in bfloat16 rounds that far.
LOGPROB_SLACK = 1e-2
_FLAGS = frozenset({0, 1})

Message = Mapping[str, Any]


class SampleStatus(StrEnum):
    """How a generation ended."""

    COMPLETED = "completed"
    """The policy stopped: end-of-sequence token, stop string or stop id."""
    TRUNCATED = "truncated"
    """The token budget ended it."""
    ABORTED = "aborted"
    """It was cut from outside and may be continued."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to the policy.

    Args:
        id: Stable over epochs and restarts (data set name and row).
        messages: Chat messages for the chat template, or empty when ``text`` is used.
        text: A plain string, used as it is.
        label: The reference answer for the reward, if any.
        metadata: JSON values for the reward and for reports.
        position: Count of prompts handed out before this one since the start of the run.
        epoch: Which pass over the data set this is, from 0.
        tokens: Token ids once encoded; encoded once and kept.
    """

    id: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    position: int = 0
    epoch: int = 0
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that there is exactly one form of the question.

        Raises:
            SampleError: With both or neither of ``messages`` and ``text``, and no tokens.
        """
        if self.messages and self.text:
            raise SampleError("prompt has messages and text", where=f"prompt {self.id}", expected="one of the two")
        if not self.messages and not self.text and not self.tokens:
            raise SampleError("prompt is empty", where=f"prompt {self.id}", expected="messages, text or tokens")

    @property
    def group_id(self) -> str:
        """Identity of the group of samples that answers this prompt in this epoch."""
        return f"{self.id}@{self.epoch}"

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt as JSON values."""
        return {
            "id": self.id,
            "messages": [dict(m) for m in self.messages],
            "text": self.text,
            "label": self.label,
            "metadata": dict(self.metadata),
            "position": self.position,
            "epoch": self.epoch,
            "tokens": list(self.tokens),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prompt:
        """Rebuild what ``to_dict`` returned."""
        return cls(**{**values, "messages": tuple(values["messages"]), "tokens": tuple(values["tokens"])})


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens ``[start, end)`` were sampled by weights of ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one sample went, in seconds.

    Args:
        queue_s: Waiting for a free slot of an engine.
        generate_s: From sending the request to the last token.
        reward_s: Scoring.
        attempts: Requests sent until one succeeded.
        engine: Name of the engine that answered.
    """

    queue_s: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0
    attempts: int = 1
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the policy; the module's docstring gives the layout and the invariants.

    Args:
        prompt_id: ``Prompt.id``.
        group_id: ``Prompt.group_id``; advantages are computed over equal ids, never by position.
        index: Which sample of its group, from 0.
        tokens: Prompt and response, ids, length S.
        prompt_length: P.
        loss_mask: 0 or 1 per response token, length R = S - P.
        logprobs: Behaviour logprob (nats) per response token, length R; 0.0 where the policy did not write the token.
        versions: Which weights sampled which response tokens.
        status: How generation ended.
        response: The response as text, special tokens left out; for rewards and reports only.
        seed: The sampling seed that was sent, so that the sample can be repeated.
        label: The reference answer, from the prompt.
        metadata: From the prompt.
        reward: The score, ``None`` until scored.
        reward_reason: Why the score is what it is; never empty for a score of 0.
        timings: Where the time went.
        fork: Which record of its trajectory, from 0. A trajectory of several turns is one record as long as each turn
            only appends; where earlier tokens would change, it goes on in a record of its own.
    """

    prompt_id: str
    group_id: str
    index: int
    tokens: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    status: SampleStatus
    response: str = ""
    seed: int | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    reward_reason: str = ""
    timings: Timings = Timings()
    fork: int = 0

    def __post_init__(self) -> None:
        """Check every invariant.

        Raises:
            SampleError: Naming the sample, the field, and the value seen and expected.
        """
        if not 0 < self.prompt_length <= len(self.tokens):
            self._fail("prompt_length", str(self.prompt_length), f"1..{len(self.tokens)} (the number of tokens)")
        length = self.response_length
        for name, values in (("loss_mask", self.loss_mask), ("logprobs", self.logprobs)):
            if len(values) != length:
                self._fail(name, f"{len(values)} entries", f"{length}, the response length")
        if not _FLAGS.issuperset(self.loss_mask):
            self._fail("loss_mask", str(sorted(set(self.loss_mask))), "0 or 1 per token")
        if (position := first_bad_logprob(self.logprobs)) is not None:
            self._fail(f"logprobs[{position}]", repr(self.logprobs[position]), "a finite number of at most 0")
        self._check_spans()
        self._check_reward()

    def _check_reward(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            self._fail("reward", repr(self.reward), "a finite number")
        if self.reward == 0 and not self.reward_reason:
            self._fail("reward_reason", "empty", "a reason, because the score is 0")

    def _check_spans(self) -> None:
        end = 0
        masked_out = list(self.loss_mask)
        for span in self.versions:
            if not end <= span.start < span.end <= self.response_length:
                self._fail("versions", str(self.versions), f"ordered, disjoint spans within 0..{self.response_length}")
            end = span.end
            masked_out[span.start : span.end] = [0] * (span.end - span.start)
        if any(masked_out):
            self._fail(
                "versions", f"no version for response token {masked_out.index(1)}", "one for every trained token"
            )

    def _fail(self, name: str, seen: str, expected: str) -> None:
        where = f"sample {self.index} of group {self.group_id}"
        raise SampleError(f"sample field {name} is wrong", where=where, seen=seen, expected=expected)

    @property
    def response_length(self) -> int:
        """R: number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that the loss counts."""
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights that sampled a token, ``None`` for an empty response."""
        return min((span.version for span in self.versions), default=None)

    @property
    def newest_version(self) -> int | None:
        """Version of the newest weights that sampled a token, ``None`` for an empty response."""
        return max((span.version for span in self.versions), default=None)

    def scored(self, reward: float, reason: str = "", *, reward_s: float = 0.0) -> Sample:
        """Return the scored twin of this sample.

        Args:
            reward: A finite number.
            reason: Why; required for a score of 0.
            reward_s: Seconds that scoring took.

        Raises:
            SampleError: When it is scored already, the reward is not finite, or a 0 has no reason.
        """
        if self.reward is not None:
            self._fail("reward", f"already {self.reward}", "to be scored once")
        spent = self.timings
        changed = {
            "reward": float(reward),
            "reward_reason": reason,
            "timings": Timings(spent.queue_s, spent.generate_s, reward_s, spent.attempts, spent.engine),
        }
        # What dataclasses.replace would do, but that nothing is looked at again which has been and stays.
        twin = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(twin, name, changed[name] if name in changed else getattr(self, name))
        twin._check_reward()
        return twin

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values.update(
            tokens=list(self.tokens),
            loss_mask=list(self.loss_mask),
            logprobs=list(self.logprobs),
            versions=[[s.version, s.start, s.end] for s in self.versions],
            status=self.status.value,
            metadata=dict(self.metadata),
            timings=dataclasses.asdict(self.timings),
        )
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Rebuild what ``to_dict`` returned, checking it again."""
        fields = dict(values)
        for name in ("tokens", "loss_mask", "logprobs"):
            fields[name] = tuple(fields[name])
        fields["versions"] = tuple(VersionSpan(*span) for span in fields["versions"])
        fields["status"] = SampleStatus(fields["status"])
        fields["timings"] = Timings(**fields["timings"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt; groups may differ in size.

    Args:
        prompt: The prompt.
        samples: At least one, all of ``prompt.group_id``, no two of one index and fork.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        """Check identity.

        Raises:
            SampleError: When a sample belongs to another group, is there twice, or the group is empty.
        """
        where = f"group {self.prompt.group_id}"
        if not self.samples:
            raise SampleError("sample group is empty", where=where, expected="at least one sample")
        if strangers := sorted({s.group_id for s in self.samples} - {self.prompt.group_id}):
            raise SampleError("samples of another group", where=where, seen=", ".join(strangers))
        records = [(s.index, s.fork) for s in self.samples]
        if len(set(records)) != len(records):
            raise SampleError("a sample is there twice", where=where, seen=f"(index, fork) {records}")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over the samples."""
        return iter(self.samples)

    @property
    def is_scored(self) -> bool:
        """Whether every sample has a reward."""
        return all(s.reward is not None for s in self.samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the samples, in order; only of a scored group."""
        if not self.is_scored:
            raise SampleError("group is not scored", where=f"group {self.prompt.group_id}")
        return tuple(s.reward for s in self.samples if s.reward is not None)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights behind any token of the group, ``None`` when no token was sampled."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        return {"prompt": self.prompt.to_dict(), "samples": [s.to_dict() for s in self.samples]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleGroup:
        """Rebuild what ``to_dict`` returned, checking it again."""
        samples = tuple(Sample.from_dict(s) for s in values["samples"])
        return cls(prompt=Prompt.from_dict(values["prompt"]), samples=samples)


def first_bad_logprob(logprobs: Sequence[float], above: float = -math.inf) -> int | None:
    """Return where the first logprob is that is not finite, or not above ``above``, or more than 0 (beyond rounding).

    Thousands of them are looked at between two answers of an engine, so they are first looked at together: a sum is
    finite only if all its terms are (it may also overflow), and among finite numbers least and greatest tell the rest.

    Args:
        logprobs: Nats.
        above: A number that marks what is no logprob.

    Returns:
        ``None`` when all are good.
    """
    low = above < min(logprobs, default=0.0) if above > -math.inf else True
    if low and math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= LOGPROB_SLACK:
        return None
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob <= above or logprob > LOGPROB_SLACK:
            return position
    return None


def full_length(sample: Sample, values: Sequence[float], *, prompt_value: float = 0.0) -> tuple[float, ...]:
    """Extend a response-long sequence to the whole sample: P times ``prompt_value``, then ``values``.

    Args:
        sample: Gives P and R.
        values: Length R.
        prompt_value: What the prompt's positions get.

    Returns:
        Length S; entry i belongs to the prediction OF ``tokens[i]``.

    Raises:
        SampleError: When ``values`` is not R long.
    """
    if len(values) != sample.response_length:
        raise SampleError(
            "values do not match the response",
            where=f"group {sample.group_id}",
            seen=f"{len(values)} values",
            expected=str(sample.response_length),
        )
    return (prompt_value,) * sample.prompt_length + tuple(values)
