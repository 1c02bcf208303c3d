"""The README's example runs as it stands, and it names what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from vime_grpo.advantages import ADVANTAGES
from vime_grpo.batch import AGGREGATIONS
from vime_grpo.kl import KL_KINDS
from vime_grpo.losses import POLICY_LOSSES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    # On policy the gradient is minus weight times advantage: better answers become likelier.
    assert (names["logprobs"].grad[[2, 3]] < 0).all()
    assert names["logprobs"].grad[6] > 0


def test_it_names_everything_that_is_registered() -> None:
    for registry in (ADVANTAGES, AGGREGATIONS, KL_KINDS, POLICY_LOSSES):
        for entry in registry:
            assert f"`{entry.name}`" in README
            assert len(entry.paper) > 10
