"""Mathematical equality of the final answer and the label, by math-verify.

Imported in worker processes only: sympy takes a second to import, and may run for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_SHOWN = 80
#: What shows that a label says itself where its mathematics is.
_MARKS = ("$", r"\boxed", r"\(", r"\[")


@lru_cache(maxsize=4096)  # the samples of a group share their label
def _parse_label(label: str) -> list[Any]:
    # Without delimiters, "1+x" would be read as the number 1 in some text.
    text = label if any(mark in label for mark in _MARKS) else f"${label}$"
    return list(parse(text, parsing_timeout=None) or parse(label, parsing_timeout=None))


def grade_math(payload: Mapping[str, Any]) -> tuple[float, str]:
    """Return (1, "") when response and label are mathematically equal, else (0, reason).

    math-verify's own time-outs are off: they need signals, and the worker's timer covers both parsing and comparing.
    """
    label = _parse_label(payload["label"])
    if not label:
        return 0.0, f"label {payload['label'][:_SHOWN]!r} is no mathematical expression"
    answer = parse(payload["response"], parsing_timeout=None)
    if not answer:
        return 0.0, f"no answer: no mathematical expression in {payload['response'][-_SHOWN:]!r}"
    if verify(label, answer, timeout_seconds=None):
        return 1.0, ""
    return 0.0, f"answer {str(answer[-1])[:_SHOWN]!r} differs from label {payload['label'][:_SHOWN]!r}"
