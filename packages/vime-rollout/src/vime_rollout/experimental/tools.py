"""Tools for a policy: calls found in its text, run under a time-out, and answered with messages.

The format of a call is the model's affair, so the parser is a function that can be named by a dotted path. The one here
reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, which the chat templates of the Qwen and Hermes
families teach. A call that cannot be read or run is answered with the reason: the policy may learn from it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime_rollout.sample import Message, SampleStatus

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy wrote.

    Args:
        name: Of the tool; empty when the call cannot be read.
        arguments: By name.
        error: Why the call cannot be read; empty when it can.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


ToolParser = Callable[[str], Sequence[ToolCall]]
"""``def parse(text: str) -> Sequence[ToolCall]``: the calls in one turn of the policy, in order."""


def json_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls between ``<tool_call>`` tags."""
    calls = []
    for body in _CALL.findall(text):
        try:
            value = json.loads(body)
            call = ToolCall(str(value["name"]), dict(value.get("arguments") or {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            call = ToolCall("", error=f"{type(error).__name__}: {error} in {body.strip()[:80]!r}")
        calls.append(call)
    return calls


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy has just written.

    Args:
        number: From 0.
        text: Without special tokens.
        calls: Tool calls in it.
        status: How it ended.
    """

    number: int
    text: str
    calls: tuple[ToolCall, ...]
    status: SampleStatus


class Environment(Protocol):
    """What answers the policy; one object for one trajectory."""

    async def reply(self, turn: Turn) -> Sequence[Message]:
        """Return the messages that answer a turn; none ends the trajectory."""
        ...


Tool = Callable[..., Awaitable[object]]
"""``async def tool(**arguments) -> object``: what it returns is shown as text."""


class ToolEnvironment:
    """Runs the calls of each turn, at one time; a turn without a call ends the trajectory.

    Args:
        tools: By name.
        timeout_s: Seconds for one call.
        role: Role of the answers, as the chat template knows it.
        most_characters: Longer results are cut, and say so.
    """

    def __init__(
        self, tools: Mapping[str, Tool], *, timeout_s: float = 30.0, role: str = "tool", most_characters: int = 4000
    ) -> None:
        """Keep the tools."""
        self._tools = dict(tools)
        self._timeout_s = timeout_s
        self._role = role
        self._most = most_characters

    async def reply(self, turn: Turn) -> list[Message]:
        """Return one message for each call, in their order."""
        results = await asyncio.gather(*map(self._run, turn.calls))
        return [{"role": self._role, "content": text} for text in results]

    async def _run(self, call: ToolCall) -> str:
        if call.error:
            return f"error: the call cannot be read ({call.error})"
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}; there are {', '.join(sorted(self._tools))}"
        try:
            async with asyncio.timeout(self._timeout_s):
                text = str(await self._tools[call.name](**call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {self._timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is an answer to the policy that called it
            return f"error: {type(error).__name__}: {error}"[: self._most]
        return text if len(text) <= self._most else f"{text[: self._most]}... ({len(text)} characters)"


async def add(*, a: float, b: float) -> float:
    """Add two numbers: the tool of the example."""
    return a + b


def calculator(prompt: object) -> ToolEnvironment:
    """Make the example's environment: one tool, ``add(a, b)``."""
    del prompt
    return ToolEnvironment({"add": add})
