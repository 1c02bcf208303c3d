"""The cells of the matrix, read from ``pyproject.toml`` and expanded as hatch expands them.

A cell is one value of every axis. Cells that share Python, vLLM and Megatron-Core share an environment: the other axes
are options of a run. hatch has no exclusions, so its products leave out what cannot be combined; the reasons stand in a
table of their own, and `problems` holds one against the other.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]
ROOT = FOLDER.parents[1]
ENVIRONMENT_AXES = ("python", "vllm", "megatron")
AXES = (*ENVIRONMENT_AXES, "mode", "model", "tp")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination.

    Attributes:
        python: Version of the interpreter, ``3.12``.
        vllm: Release line of vLLM.
        megatron: Release line of Megatron-Core, or ``newest``.
        mode: The pipeline.
        model: ``dense`` or ``moe``.
        tp: Tensor-parallel size of trainer and engine.
    """

    python: str
    vllm: str
    megatron: str
    mode: str
    model: str
    tp: str

    @property
    def environment(self) -> str:
        """Name of the environment, as hatch begins it."""
        return f"py{self.python}-{self.vllm}-{self.megatron}"

    @property
    def pipeline(self) -> str:
        """Name of the run within the environment, as hatch ends it."""
        return f"{self.mode}-{self.model}-{self.tp}"

    @property
    def name(self) -> str:
        """Name of the cell, as hatch has it."""
        return f"{self.environment}-{self.pipeline}"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """What cannot be combined.

    Attributes:
        where: Axis to value; a cell that has all of them is excluded.
        reason: Why.
    """

    where: Mapping[str, str]
    reason: str

    def matches(self, cell: Cell) -> bool:
        """Say whether a cell is excluded by this."""
        return all(getattr(cell, axis) == value for axis, value in self.where.items())


@dataclass(frozen=True, slots=True)
class Refusal:
    """What vime refuses by name on a CPU, though it can be installed.

    Attributes:
        where: Axis to value; the pipelines of a cell that has all of them are refused.
        error: Name of the error that says so.
        reason: Why.
    """

    where: Mapping[str, str]
    error: str
    reason: str

    def matches(self, cell: Cell) -> bool:
        """Say whether the pipelines of a cell are refused by this."""
        return all(getattr(cell, axis) == value for axis, value in self.where.items())


@dataclass(frozen=True, slots=True)
class Definition:
    """The matrix.

    Attributes:
        cells: What is meant to work, in hatch's order.
        whole: Every combination of the axes' values.
        excluded: What is left out, and why.
        refused: What is refused on a CPU, and why.
        hatch: The settings of the environment, for dependencies.
    """

    cells: tuple[Cell, ...]
    whole: tuple[Cell, ...]
    excluded: tuple[Exclusion, ...]
    refused: tuple[Refusal, ...]
    hatch: Mapping[str, Any]

    def environments(self) -> dict[str, Cell]:
        """Return the first cell of every environment, by the environment's name."""
        found: dict[str, Cell] = {}
        for cell in self.cells:
            found.setdefault(cell.environment, cell)
        return found

    def dependencies(self, cell: Cell, root: Path = ROOT) -> list[str]:
        """Return what is installed for a cell, with its context fields filled in.

        Args:
            cell: The cell.
            root: The workspace.
        """
        overrides = self.hatch["overrides"]["matrix"]
        chosen = [
            item["value"]
            for axis in ENVIRONMENT_AXES
            for item in overrides.get(axis, {}).get("dependencies", [])
            if getattr(cell, axis) in item["if"]
        ]
        return [
            text.replace("{root:parent:parent:uri}", root.as_uri()) for text in [*self.hatch["dependencies"], *chosen]
        ]

    def refusal(self, cell: Cell) -> Refusal | None:
        """Return what refuses a cell's pipelines on a CPU, if anything does."""
        return next((rule for rule in self.refused if rule.matches(cell)), None)

    def problems(self) -> list[str]:
        """List where products and exclusions contradict each other; none where the definition is sound."""
        found = []
        missing = set(self.whole) - set(self.cells)
        found += [f"{cell.name} is in no product and excluded by nothing" for cell in missing if not self._why(cell)]
        found += [
            f"{cell.name} is in a product and excluded: {self._why(cell)}" for cell in self.cells if self._why(cell)
        ]
        found += [f"{cell.name} has a value that no axis lists" for cell in set(self.cells) - set(self.whole)]
        found += [f"{rule.where} excludes nothing" for rule in self.excluded if not any(map(rule.matches, self.whole))]
        found += [f"{rule.where} refuses nothing" for rule in self.refused if not any(map(rule.matches, self.cells))]
        reasons = [(rule.where, rule.reason) for rule in self.excluded]
        reasons += [(rule.where, rule.reason) for rule in self.refused]
        found += [f"{where} has no reason" for where, reason in reasons if not reason.strip()]
        if len(self.cells) != len(set(self.cells)):
            found.append("two products share a cell")
        return sorted(found)

    def _why(self, cell: Cell) -> str:
        return "; ".join(rule.reason for rule in self.excluded if rule.matches(cell))


def load(path: Path = FOLDER / "pyproject.toml") -> Definition:
    """Read the matrix.

    Args:
        path: Its ``pyproject.toml``.

    Raises:
        KeyError: A table is missing.
    """
    tool = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]
    stack, ours = tool["hatch"]["envs"]["stack"], tool["vime-matrix"]
    cells = [cell for product in stack["matrix"] for cell in _expand(ours["axes"], product)]
    excluded = tuple(Exclusion(rule["where"], rule["reason"]) for rule in ours["excluded"])
    refused = tuple(Refusal(rule["where"], rule["error"], rule["reason"]) for rule in ours.get("refused", ()))
    return Definition(tuple(cells), tuple(_expand(ours["axes"], ours["values"])), excluded, refused, stack)


def select(cells: Sequence[Cell], where: Mapping[str, str]) -> list[Cell]:
    """Return the cells that have the given values."""
    return [cell for cell in cells if all(getattr(cell, axis) == value for axis, value in where.items())]


def _expand(axes: Sequence[str], product: Mapping[str, Sequence[str]]) -> list[Cell]:
    return [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*(product[a] for a in axes))]
