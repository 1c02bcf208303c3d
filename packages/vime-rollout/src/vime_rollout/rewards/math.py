"""Mathematical equality of the final answer and the label, by math-verify (runs in a worker process)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vime_rollout.rewards.base import need_label
from vime_rollout.sample import Sample

_SHOWN = 80


def math_payload(sample: Sample) -> dict[str, Any]:
    """Return what ``grade_math`` needs of a sample.

    Raises:
        RewardError: When it has no label.
    """
    return {"response": sample.response, "label": need_label(sample, "math_verify")}


@lru_cache(maxsize=4096)
def _parse_label(label: str) -> list[Any]:
    from math_verify import parse  # only in the worker: sympy takes a second to import

    # A bare expression such as "x+1" is not found without delimiters, and groups of one prompt share their label.
    parsed = parse(label, parsing_timeout=None) or parse(f"${label}$", parsing_timeout=None)
    return list(parsed)


def grade_math(payload: Mapping[str, Any]) -> tuple[float, str]:
    """Return (1, "") when response and label are mathematically equal, else (0, reason).

    math-verify's own time-outs are off: they need signals, and the worker's timer covers both parsing and comparing.
    """
    from math_verify import parse, verify

    label = _parse_label(payload["label"])
    if not label:
        return 0.0, f"label {payload['label'][:_SHOWN]!r} is no mathematical expression"
    answer = parse(payload["response"], parsing_timeout=None)
    if not answer:
        return 0.0, f"no answer: no mathematical expression in {payload['response'][-_SHOWN:]!r}"
    if verify(label, answer, timeout_seconds=None):
        return 1.0, ""
    return 0.0, f"answer {str(answer[-1])[:_SHOWN]!r} differs from label {payload['label'][:_SHOWN]!r}"
