"""Functions found by name, each with the paper it comes from.

A name in the configuration means one function. The registries are small on purpose: a function enters one with a paper
and a test, and the configuration's choices are exactly the registered names (a test holds the two together).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vime_grpo.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[F]):
    """One registered function.

    Attributes:
        name: Its name in the configuration.
        function: The function.
        paper: Where it comes from: title and arXiv number, or the text that defined it.
    """

    name: str
    function: F
    paper: str


class Registry(Generic[F]):
    """Named functions of one kind.

    Args:
        kind: What they are, for error texts: ``"KL estimator"``.
    """

    def __init__(self, kind: str) -> None:
        """Start empty."""
        self.kind = kind
        self._entries: dict[str, Entry[F]] = {}

    def register(self, name: str, *, paper: str) -> Callable[[F], F]:
        """Return a decorator that registers a function under a name.

        Args:
            name: Name in the configuration.
            paper: Where the function comes from.

        Raises:
            ConfigError: The name is taken.
        """

        def decorate(function: F) -> F:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered twice", fix="choose another name")
            self._entries[name] = Entry(name, function, paper)
            return function

        return decorate

    def get(self, name: str) -> F:
        """Return the function of a name.

        Raises:
            ConfigError: There is none; the text names the nearest.
        """
        check_choice(self.kind, name, tuple(self._entries))
        return self._entries[name].function

    def names(self) -> tuple[str, ...]:
        """Return the registered names, in order of registration."""
        return tuple(self._entries)

    def __iter__(self) -> Iterator[Entry[F]]:
        """Iterate over the entries."""
        return iter(self._entries.values())


def check_choice(kind: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a name that is not among those allowed.

    Args:
        kind: What it names, for the text.
        name: The name.
        allowed: All there are.

    Raises:
        ConfigError: It is none of them; the text names the nearest.
    """
    if name not in allowed:
        close = difflib.get_close_matches(name, allowed, n=1)
        fix = f"did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {kind} {name!r}", expected=f"one of {', '.join(allowed)}", fix=fix)
