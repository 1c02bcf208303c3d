"""The points where a run can be given code of its own: generate, filter, data source (rewards: ``load_reward``).

=============  ==================================================================  ========================
loader         form                                                                 contract test
=============  ==================================================================  ========================
load_generate  ``async def fn(rollout, prompt, index, version, **options)``         ``testing.check_generate``
load_filter    ``def fn(group, **options) -> str``                                  ``testing.check_filter``
load_source    ``def fn(**options)`` or a class: gives a ``DataSource``             ``testing.check_source``
load_reward    ``async def fn(sample, **options) -> float | Score``                 ``testing.check_reward``
=============  ==================================================================  ========================

What a path names is checked when it is loaded (``dotted``), before anything is started; what only calling it can tell
is told by the contract tests, which belong into the test suite of whoever wrote it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vime_rollout import dotted
from vime_rollout.data.source import DataSource
from vime_rollout.errors import ExtensionError
from vime_rollout.filters import GroupFilter, all_groups, differing_rewards
from vime_rollout.rollout import GenerateFunction
from vime_rollout.tokens import Encoder

_GENERATE = "async def fn(rollout: Rollout, prompt: Prompt, index: int, version: int | None) -> Sample"
_FILTER = "def fn(group: SampleGroup) -> str"
_SOURCE_METHODS = ("next", "state_dict", "load_state_dict")
_FILTERS: dict[str, GroupFilter] = {"differing_rewards": differing_rewards, "all": all_groups}


def load_generate(path: str, options: Mapping[str, Any] | None = None) -> GenerateFunction:
    """Return the generate function of a dotted path.

    Args:
        path: ``package.module:name`` of a function, an object that is called, or a class of such objects.
        options: Keyword arguments of the function, or of the class.

    Raises:
        ExtensionError: When it cannot be imported, or called as a ``GenerateFunction``.
    """
    kind = "generate function"
    target = dotted.find(path, kind, ExtensionError)
    names = ("rollout", "prompt", "index", "version")
    return dotted.bind(
        target, path, kind, _GENERATE, names, options=dict(options or {}), asynchronous=True, error=ExtensionError
    )


def load_filter(name: str, options: Mapping[str, Any] | None = None) -> GroupFilter:
    """Return the filter of a name (``differing_rewards``, ``all``) or a dotted path.

    Args:
        name: The name or the path.
        options: Keyword arguments of a filter of your own.

    Raises:
        ExtensionError: When there is no such filter, or it cannot be called as one.
    """
    if name in _FILTERS:
        if options:
            raise ExtensionError("filter takes no options", where=f"filter {name}", seen=", ".join(options))
        return _FILTERS[name]
    if "." not in name and ":" not in name:
        known = ", ".join(_FILTERS)
        raise ExtensionError("unknown filter", seen=name, expected=f"{known}, or package.module:function")
    target = dotted.find(name, "filter", ExtensionError)
    return dotted.bind(
        target,
        name,
        "filter",
        _FILTER,
        ("group",),
        options=dict(options or {}),
        asynchronous=False,
        error=ExtensionError,
    )


def load_source(path: str, options: Mapping[str, Any] | None = None, *, encoder: Encoder | None = None) -> DataSource:
    """Make the data source of a dotted path.

    Args:
        path: ``package.module:name`` of a class or a function that makes a source.
        options: Its keyword arguments.
        encoder: Given to it as ``encoder`` where it has a parameter of that name.

    Raises:
        ExtensionError: When it cannot be imported or made, or what it makes lacks a method of a ``DataSource``.
    """
    kind = "data source"
    target = dotted.find(path, kind, ExtensionError)
    values = dict(options or {})
    if not callable(target):
        raise ExtensionError(
            "data source cannot be made", where=f"{kind} {path}", seen=dotted.describe(target), expected="a class"
        )
    if encoder is not None and "encoder" in inspect.signature(target).parameters:
        values.setdefault("encoder", encoder)
    source = dotted.make(target, path, kind, options=values, error=ExtensionError)
    for method, arguments in zip(_SOURCE_METHODS, (("n",), (), ("state",)), strict=True):
        form = f"def {method}(self{''.join(f', {a}' for a in arguments)})"
        bound = getattr(source, method, None)
        if bound is None:
            seen = f"{type(source).__qualname__} without {method}"
            raise ExtensionError("data source lacks a method", where=f"{kind} {path}", seen=seen, expected=form)
        dotted.bind(
            bound, path, f"{kind}'s {method}", form, arguments, options={}, asynchronous=False, error=ExtensionError
        )
    return source  # type: ignore[no-any-return]
