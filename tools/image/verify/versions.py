"""Enough of PEP 440 to compare the versions that images hold, with the standard library alone.

A base image need not have ``packaging``, and the tool that judges the image should not depend on its content. Epochs
are not supported (none of the packages concerned has one) and raise.

Order, as in PEP 440: ``1.0.dev1 < 1.0a1 < 1.0b1 < 1.0rc1 < 1.0 < 1.0.post1``; the local part (``+rocm7.14``) is
ignored by every comparison but ``===``.
"""

from __future__ import annotations

import re

_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<pre>a|b|rc|alpha|beta|c|pre|preview)[-_.]?(?P<pre_n>\d*))?"
    r"(?:[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*)|-(?P<bare_post>\d+))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"\s*(===|~=|==|!=|<=|>=|<|>)\s*([^\s,]+)\s*")
_PRE_RANK = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}

Key = tuple[tuple[int, ...], tuple[int, int], int, tuple[int, int]]


def parse(text: str) -> Key:
    """Turn a version into something that sorts.

    Args:
        text: A version, with or without a local part.

    Returns:
        A key; keys of versions that differ only in local part or trailing zeros are equal.

    Raises:
        ValueError: It is not a version that this module understands.
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a version")
    release = [int(part) for part in match["release"].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    post = -1
    if match["post"] or match["bare_post"]:
        post = int(match["post_n"] or match["bare_post"] or 0)
    dev = (0, int(match["dev_n"] or 0)) if match["dev"] else (1, 0)
    if match["pre"]:
        pre = (_PRE_RANK[match["pre"].lower()], int(match["pre_n"] or 0))
    else:
        # A development release of a final one sorts before its alphas.
        pre = (-1, 0) if match["dev"] and post < 0 else (3, 0)
    return tuple(release), pre, post, dev


def is_prerelease(text: str) -> bool:
    """Say whether a version is one that ``>=`` of a final release does not mean (alpha, beta, rc, dev)."""
    _, pre, _, dev = parse(text)
    return pre[0] < 3 or dev[0] == 0


def matches(version: str, specifier: str) -> bool:
    """Say whether a version lies in a range.

    Unlike pip, pre-releases are not left out: an installed release candidate is judged by its place in the order.

    Args:
        version: The installed version.
        specifier: Comma-separated clauses such as ``>=0.28,<0.33``; empty allows all.

    Returns:
        Whether every clause holds.

    Raises:
        ValueError: A version or a clause that cannot be read.
    """
    clauses = [clause for clause in specifier.split(",") if clause.strip()]
    return all(_holds(version, clause) for clause in clauses)


def _holds(version: str, clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause!r} is not a version clause")
    operator, bound = match.groups()
    if operator == "===":
        return version == bound
    if bound.endswith(".*"):
        return _prefix(version, bound[:-2]) == (operator == "==")
    if operator in ("==", "!=") and "+" in bound:
        return (version.lower() == bound.lower()) == (operator == "==")
    have, want = parse(version), parse(bound)
    if operator == "~=":
        family = re.split(r"[^0-9.]", bound)[0].strip(".").split(".")[:-1]
        return have >= want and _prefix(version, ".".join(family))
    # PEP 440: "<1.0" leaves out the pre-releases of 1.0 itself, and ">1.0" its post-releases.
    if operator == "<" and have[0] == want[0] and is_prerelease(version) and not is_prerelease(bound):
        return want[2] >= 0 and have[:3] != want[:3] and have < want
    if operator == ">" and have[:2] == want[:2] and have[2] >= 0 and want[2] < 0 and want[3][0] == 1:
        return False
    return {"==": have == want, "!=": have != want, "<=": have <= want, ">=": have >= want, "<": have < want,
            ">": have > want}[operator]  # fmt: skip


def _prefix(version: str, family: str) -> bool:
    release = re.match(r"v?(\d+(?:\.\d+)*)", version)
    parts = [int(part) for part in release[1].split(".")] if release else []
    wanted = [int(part) for part in family.split(".")]
    parts += [0] * (len(wanted) - len(parts))
    return parts[: len(wanted)] == wanted
