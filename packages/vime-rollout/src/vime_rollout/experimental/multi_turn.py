"""Several turns of policy and environment, with nothing ever tokenised twice.

A trajectory is one list of token ids that only grows. What the policy sampled stays as it was sampled. What the
environment says is appended as the chat template writes it: the template renders all messages, and if that text begins
with the text of the ids that are there, the rest of it is what is new, and only that is tokenised. The new ids have
``loss_mask`` 0 and no version, because no weights made them.

Forks. If the rendered text does not begin so, the template has changed something earlier: many drop the reasoning of
past turns, some trim spaces. Then the ids that are there stay, as a record of their own, with everything the policy
wrote in them trained on; and the trajectory goes on in a new record (``Sample.fork``) whose prompt is the whole
rendered text. So each turn is trained on in the very context in which it was sampled, and once.

Bounds. At most ``max_turns`` turns and ``max_context_tokens`` ids; a turn that is cut by its token budget, and a
trajectory that still had something to say at a bound, are *truncated*. Each request has a seed of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vime_rollout import dotted
from vime_rollout.engine.request import GenerateRequest, Generation
from vime_rollout.errors import ExtensionError, RolloutError
from vime_rollout.experimental.tools import Environment, ToolParser, Turn, json_tool_calls
from vime_rollout.sample import Message, Prompt, Sample, SampleStatus, Timings, VersionSpan

if TYPE_CHECKING:
    from vime_rollout.rollout import Rollout

MakeEnvironment = Callable[[Prompt], Environment]
"""``def make(prompt: Prompt) -> Environment``: one environment for one trajectory; a class may be it."""

_MAX_CONTINUATIONS = 64


@dataclass(slots=True)
class _Record:
    """Token ids that only grow, and what belongs to each after the prompt."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    parts: list[Generation] = field(default_factory=list)

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def add_sampled(self, part: Generation) -> None:
        offset = len(self.tokens)
        for span in part.versions:
            start, end = span.start + offset, span.end + offset
            if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == start:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, start, end))
        self.tokens += part.tokens
        self.mask += [1] * len(part.tokens)
        self.logprobs += part.logprobs
        self.parts.append(part)

    def add_given(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


class MultiTurn:
    """A generate function: policy and environment in turns; see the module's docstring.

    The number of turns is ``RolloutConfig.max_turns``. The sample's metadata gets ``turns`` and ``messages``, for the
    reward; the environment may add to them with an attribute ``metadata``.

    Args:
        environment: Makes the environment of a trajectory; or its dotted path.
        parser: Finds tool calls in a turn; or its dotted path.
        reply_deadline_s: Seconds that the environment may take to answer a turn.

    Raises:
        ExtensionError: When a dotted path names something else.
    """

    def __init__(
        self,
        environment: str | MakeEnvironment,
        *,
        parser: str | ToolParser = json_tool_calls,
        reply_deadline_s: float = 120.0,
    ) -> None:
        """Find and check what the paths name."""
        self._environment: MakeEnvironment = environment if callable(environment) else _find_environment(environment)
        self._parser: ToolParser = parser if callable(parser) else _find_parser(parser)
        self._deadline_s = reply_deadline_s

    async def __call__(self, rollout: Rollout, prompt: Prompt, index: int, version: int | None) -> list[Sample]:
        """Make one trajectory.

        Returns:
            Its records, in order; the last one is scored.

        Raises:
            RolloutError: When the prompt is no chat or fills the context, or the environment fails or is too late.
            EngineError: From the engine.
        """
        if not prompt.messages:
            raise RolloutError(
                "several turns need chat messages",
                where=f"prompt {prompt.id}",
                seen="plain text",
                fix="set apply_chat_template",
            )
        trajectory = _Trajectory(rollout, prompt, index, version)
        environment = self._environment(prompt)
        status = SampleStatus.TRUNCATED
        for number in range(rollout.config.max_turns):
            turn_status, text = await trajectory.take_turn()
            if turn_status is not SampleStatus.COMPLETED:
                break
            turn = Turn(number, text, tuple(self._parser(text)), turn_status)
            answer = await self._reply(environment, turn, trajectory.where)
            if not answer:
                status = SampleStatus.COMPLETED
                break
            if number + 1 == rollout.config.max_turns or not trajectory.append(answer):
                break
        return trajectory.samples(status, getattr(environment, "metadata", {}))

    async def _reply(self, environment: Environment, turn: Turn, where: str) -> Sequence[Message]:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await environment.reply(turn)
        except TimeoutError as error:
            raise RolloutError(
                "environment did not answer in time",
                where=f"turn {turn.number} of {where}",
                seen=f"no answer after {self._deadline_s:g} s",
                fix="raise reply_deadline_s, or give the environment a time-out of its own that it answers with",
            ) from error
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(
                "environment failed",
                where=f"turn {turn.number} of {where}",
                seen=f"{type(error).__name__}: {error}",
                fix="catch in the environment what the policy can cause, and answer with it",
            ) from error


class _Trajectory:
    """The state of one trajectory: messages, records, and the number of requests made so far."""

    def __init__(self, rollout: Rollout, prompt: Prompt, index: int, version: int | None) -> None:
        self._rollout, self._prompt, self._index, self._version = rollout, prompt, index, version
        self._messages: list[Message] = list(prompt.messages)
        self._records = [_Record(prompt.tokens)]
        self._requests = 0
        self._turns = 0
        self.where = f"sample {index} of group {prompt.group_id}"
        if self._room < 1:
            raise RolloutError(
                "prompt leaves no room for a response",
                where=f"prompt {prompt.id}",
                seen=f"{len(prompt.tokens)} tokens",
                expected=f"fewer than max_context_tokens = {rollout.config.max_context_tokens}",
            )

    @property
    def _room(self) -> int:
        return self._rollout.config.max_context_tokens - len(self._records[-1].all)

    async def take_turn(self) -> tuple[SampleStatus, str]:
        """Let the policy write one turn; return how it ended, and its text."""
        record = self._records[-1]
        first, budget = len(record.tokens), min(self._room, self._rollout.config.sampling.max_tokens)
        for _ in range(_MAX_CONTINUATIONS):
            made = len(record.tokens) - first
            part = await self._ask(record, budget - made, made)
            record.add_sampled(part)
            made += len(part.tokens)
            if part.status is not SampleStatus.ABORTED or made >= budget:
                break
        else:
            raise RolloutError("turn is cut again and again", where=self.where, seen=f"{made} of {budget} tokens")
        text = self._rollout.encoder.decode(record.tokens[first:])
        self._messages.append({"role": "assistant", "content": text})
        self._turns += 1
        return (SampleStatus.TRUNCATED if part.status is SampleStatus.ABORTED else part.status), text

    async def _ask(self, record: _Record, most: int, made: int) -> Generation:
        config = self._rollout.config
        fewest = max(0, min(config.sampling.min_tokens - made, most))
        request = GenerateRequest(
            tokens=record.all,
            sampling=dataclasses.replace(config.sampling, max_tokens=most, min_tokens=fewest),
            seed=self._rollout.seed_of(self._prompt, self._index, self._requests),
            request_id=f"{self._prompt.group_id}-{self._index}-{self._requests}",
            # The next turn finds this one's keys and values in the engine that computed them.
            session_id=f"{self._prompt.group_id}-{self._index}",
        )
        self._requests += 1
        return await self._rollout.engine.generate(request, version=self._version, deadline_s=config.request_deadline_s)

    def append(self, answer: Sequence[Message]) -> bool:
        """Append the environment's messages, in a new record if need be; return whether there is room for a turn."""
        encoder, record = self._rollout.encoder, self._records[-1]
        self._messages += answer
        rendered = encoder.render(self._messages, where=self.where)
        present = encoder.decode(record.all, special=True)
        if rendered.startswith(present):
            given = encoder.encode_text(rendered[len(present) :])
            if len(given) >= self._room:
                return False
            record.add_given(given)
            return True
        fork = _Record(encoder.encode_text(rendered))
        if len(fork.prompt) >= self._rollout.config.max_context_tokens:
            return False
        self._records.append(fork)
        return True

    def samples(self, status: SampleStatus, more: object) -> list[Sample]:
        """Return the records; all but the last are completed, for the trajectory went on after them."""
        prompt, last = self._prompt, len(self._records) - 1
        metadata = {**prompt.metadata, "turns": self._turns, "messages": [dict(m) for m in self._messages]}
        metadata |= dict(more) if isinstance(more, dict) else {}
        return [
            Sample(
                prompt_id=prompt.id,
                group_id=prompt.group_id,
                index=self._index,
                tokens=record.all,
                prompt_length=len(record.prompt),
                loss_mask=tuple(record.mask),
                logprobs=tuple(record.logprobs),
                versions=tuple(record.spans),
                status=status if fork == last else SampleStatus.COMPLETED,
                response=self._rollout.encoder.decode(record.tokens),
                seed=self._rollout.seed_of(prompt, self._index),
                label=prompt.label,
                metadata=metadata,
                timings=_timings(record.parts),
                fork=fork,
            )
            for fork, record in enumerate(self._records)
        ]


def _timings(parts: Sequence[Generation]) -> Timings:
    return Timings(
        queue_s=sum(part.queue_s for part in parts),
        generate_s=sum(part.seconds for part in parts),
        attempts=sum(part.attempts for part in parts),
        engine=parts[-1].engine,
    )


def _find_environment(path: str) -> MakeEnvironment:
    kind = "environment"
    target = dotted.find(path, kind, ExtensionError)
    if not callable(target):
        raise ExtensionError(
            "environment cannot be made",
            where=f"{kind} {path}",
            seen=dotted.describe(target),
            expected="def make(prompt: Prompt) -> Environment",
        )
    return target  # type: ignore[no-any-return]


def _find_parser(path: str) -> ToolParser:
    kind, form = "tool-call parser", "def parse(text: str) -> Sequence[ToolCall]"
    target = dotted.find(path, kind, ExtensionError)
    return dotted.bind(target, path, kind, form, ("text",), options={}, asynchronous=False, error=ExtensionError)
