"""Which cells stand for the others: covering arrays over the axes of the matrix.

Failures of software are triggered by few values at once, most of them by one or two (Kuhn, Wallace and Gallo, "Software
fault interactions and implications for software testing", IEEE TSE 30(6), 2004). So a set of cells in which every ``t``
values that can go together do so at least once, a covering array of strength ``t``, finds most of what all cells would,
and is much smaller: of the 120 pipelines that a CPU can run, 9 have every two values together and 25 every three.

Invariants: only cells that can be run count, so no exclusion has to be repeated here; a choice depends on nothing but
the order of the cells and what was run before.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from vime_matrix.definition import AXES, ENVIRONMENT_AXES, Cell, Definition
from vime_matrix.results import Record

Together = frozenset[tuple[str, str]]
Records = Mapping[tuple[str, str], Record]


def together(cell: Cell, axes: Sequence[str], strength: int) -> set[Together]:
    """Return what a cell runs together: every ``strength`` of its values.

    Args:
        cell: The cell.
        axes: Which of its values count.
        strength: How many at a time.
    """
    values = [(axis, getattr(cell, axis)) for axis in axes]
    return {frozenset(some) for some in itertools.combinations(values, strength)}


def strength_of(cell: Cell, run: Collection[Cell], axes: Sequence[str]) -> int:
    """Say how well other cells stand for one: the most values of it, whichever they are, that were all run together.

    Args:
        cell: The cell that was not run.
        run: Those that were.
        axes: Which values count.

    Returns:
        0 where a value of the cell was never run.
    """
    found = 0
    for strength in range(1, len(axes) + 1):
        if not together(cell, axes, strength) <= _of(run, axes, strength):
            break
        found = strength
    return found


def choose(cells: Sequence[Cell], run: Iterable[Cell], axes: Sequence[str], strength: int) -> list[Cell]:
    """Choose cells until every ``strength`` values that go together in some cell were run together.

    Greedy: always the cell that adds most, the earlier one of equals. That is within a logarithmic factor of the
    smallest set, and near it at this size.

    Args:
        cells: Those that can be run.
        run: Those that were.
        axes: Which values count.
        strength: How many at a time.

    Returns:
        The cells to run, in the order of the choice; none where everything was.
    """
    missing = _of(cells, axes, strength) - _of(run, axes, strength)
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(together(cell, axes, strength) & missing))
        missing -= together(best, axes, strength)
        chosen.append(best)
    return chosen


def standing_for(
    definition: Definition, wanted: Sequence[tuple[Cell, str]], records: Records, strength: int
) -> list[tuple[Cell, str]]:
    """Choose among checks those that are still needed for a strength; what is recorded as run counts.

    Args:
        definition: The matrix.
        wanted: Cell and check, those of one environment together.
        records: By environment and check.
        strength: How many values at a time.

    Returns:
        The part of ``wanted`` to make, in its order.
    """
    kinds: dict[str, list[tuple[Cell, str]]] = {}
    for cell, check in wanted:
        kinds.setdefault(_kind(definition, cell, check), []).append((cell, check))
    chosen: set[tuple[Cell, str]] = set()
    for items in kinds.values():
        cell, check = items[0]
        axes, run = _axes(cell, check), like(definition, cell, check, records)
        needed = choose([cell for cell, _ in items], run, axes, min(strength, len(axes)))
        chosen |= {(cell, check) for cell, check in items if cell in needed}
    return [item for item in wanted if item in chosen]


def stood_for(definition: Definition, cell: Cell, check: str, records: Records) -> int:
    """Say how well the records stand for a check that was not made, as `strength_of` counts it."""
    return strength_of(cell, like(definition, cell, check, records), _axes(cell, check))


def like(definition: Definition, cell: Cell, check: str, records: Records) -> list[Cell]:
    """Return the cells in which the same kind of check came out as it should.

    What is refused is a kind of its own: a refusal says nothing about how a pipeline runs.

    Args:
        definition: The matrix.
        cell: A cell.
        check: What is checked in it.
        records: By environment and check.
    """
    kind, found = _kind(definition, cell, check), []
    others = definition.cells if check == cell.pipeline else definition.environments().values()
    for other in others:
        name = other.pipeline if check == cell.pipeline else check
        record = records.get((other.environment, name))
        came_out = record is not None and record.outcome in ("passed", "refused")
        if came_out and _kind(definition, other, name) == kind:
            found.append(other)
    return found


def _kind(definition: Definition, cell: Cell, check: str) -> str:
    if check != cell.pipeline:
        return check
    return "pipeline" if definition.refusal(cell) is None else "refused pipeline"


def _axes(cell: Cell, check: str) -> tuple[str, ...]:
    return AXES if check == cell.pipeline else ENVIRONMENT_AXES


def _of(cells: Iterable[Cell], axes: Sequence[str], strength: int) -> set[Together]:
    return {some for cell in cells for some in together(cell, axes, strength)}
