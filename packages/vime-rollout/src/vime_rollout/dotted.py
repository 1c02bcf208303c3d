"""Functions of your own by dotted path: found, checked against what will be asked of them, and only then used.

``package.module:name`` (or with a dot) names a function, an object with ``__call__``, or a class that is made with the
options and has one. All that can be seen without calling it is checked when it is loaded: that it can be imported, that
it is asynchronous exactly if it has to be, that it takes the arguments it will get and the options it is given. So a
typing error ends a run before the engines start, and not after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from vime_rollout.errors import RolloutError


def find(path: str, kind: str, error: type[RolloutError]) -> Any:
    """Import what a dotted path names.

    Args:
        path: ``package.module:name``, or ``package.module.name``.
        kind: What it should be, for errors: ``"reward function"``.
        error: Class of the error to raise.

    Raises:
        RolloutError: Of the class given, when the module or the name is not there, or importing the module fails.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as cause:
        raise error(
            f"{kind} cannot be imported",
            where=f"{kind} {path}",
            seen=f"{type(cause).__name__}: {cause}",
            expected="package.module:name on the Python path",
            fix="install the package, or put its folder on PYTHONPATH",
        ) from cause
    return target


def bind(
    target: Any,
    path: str,
    kind: str,
    form: str,
    arguments: tuple[str, ...],
    *,
    options: Mapping[str, Any],
    asynchronous: bool,
    error: type[RolloutError],
) -> Callable[..., Any]:
    """Check that ``target`` can be called as it will be, and return it with its options bound.

    Args:
        target: A function, an object with ``__call__``, or a class of such objects.
        path: Its dotted path, for errors.
        kind: What it should be, for errors.
        form: Its signature as one would write it, for errors.
        arguments: Names of the arguments that it gets, by position.
        options: Keyword arguments: of the class where ``target`` is one, else of every call.
        asynchronous: Whether calling it must give something to await.
        error: Class of the error to raise.

    Raises:
        RolloutError: Of the class given; says what was found and what is expected.
    """
    where, seen = f"{kind} {path}", describe(target)
    if inspect.isclass(target):
        target, options = make(target, path, kind, options=options, error=error), {}
    if not callable(target):
        raise error(f"{kind} cannot be called", where=where, seen=seen, expected=form)
    if is_async(target) is not asynchronous:
        raise error(f"{kind} is {'not ' * asynchronous}async", where=where, seen=seen, expected=form)
    try:
        inspect.signature(target).bind(*arguments, **options)
    except (TypeError, ValueError) as cause:
        asked = f"called with {', '.join(arguments)}" + (f" and options {', '.join(options)}" if options else "")
        raise error(
            f"{kind} does not take its arguments",
            where=where,
            seen=f"{seen}: {cause}",
            expected=f"{form}, {asked}",
        ) from cause
    return partial(target, **options) if options else target


def make(target: Any, path: str, kind: str, *, options: Mapping[str, Any], error: type[RolloutError]) -> Any:
    """Call a class or a factory with its options.

    Raises:
        RolloutError: Of the class given, when it does not take them or fails.
    """
    try:
        return target(**options)
    except RolloutError:
        raise
    except Exception as cause:
        raise error(
            f"{kind} cannot be made",
            where=f"{kind} {path}",
            seen=f"{describe(target)} with options {dict(options)}: {type(cause).__name__}: {cause}",
            expected="something that takes these options",
        ) from cause


def is_async(target: Any) -> bool:
    """Tell whether calling ``target`` gives a coroutine."""
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)


def describe(target: Any) -> str:
    """Return a function's or class's signature as one would write it, or the type of anything else."""
    if not callable(target):
        return f"{target!r:.80} ({type(target).__name__})"
    try:
        signature = str(inspect.signature(target))
    except (TypeError, ValueError):
        signature = "(...)"
    word = "class" if inspect.isclass(target) else "async def" if is_async(target) else "def"
    return f"{word} {getattr(target, '__qualname__', type(target).__qualname__)}{signature}"
