"""Which paper each choice of the configuration comes from, gathered from the registries that hold the functions."""

from __future__ import annotations

from typing import Any

from vime_grpo.advantages import ADVANTAGES
from vime_grpo.batch import AGGREGATIONS
from vime_grpo.correction import CORRECTIONS
from vime_grpo.kl import KL_KINDS
from vime_grpo.losses import POLICY_LOSSES
from vime_grpo.registry import Registry

#: Setting -> where its choices are registered.
REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.policy_loss": POLICY_LOSSES,
    "algorithm.correction": CORRECTIONS,
    "algorithm.kl_kind": KL_KINDS,
    "algorithm.loss_aggregation": AGGREGATIONS,
}

_HEAD = """\
# Papers

Every choice of the objective is one function, and each comes from a text that defines it. This page is generated:
`vime-grpo papers > PAPERS.md`. Ratios of sequences (`algorithm.ratio_level = "sequence"`) are those of Group Sequence
Policy Optimization, arXiv:2507.18071; pass@k is estimated as in arXiv:2107.03374.

| setting | choice | function | from |
|---|---|---|---|
"""


def paper_index() -> str:
    """Return the page as Markdown."""
    lines = [
        f"| `{setting}` | `{entry.name}` | `{entry.function.__module__}.{entry.function.__name__}` | {entry.paper} |\n"
        for setting, registry in REGISTRIES.items()
        for entry in registry
    ]
    return _HEAD + "".join(lines)
