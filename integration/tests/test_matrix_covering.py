"""Which cells stand for the others: every few values together, nothing that cannot be run, and only what was run."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "matrix"))

from vime_matrix.covering import choose, like, standing_for, stood_for, strength_of, together
from vime_matrix.definition import AXES, Cell, Definition, Refusal, load
from vime_matrix.results import Outcome, Record

CELLS = load().cells
some_cells = st.lists(st.sampled_from(CELLS), min_size=1, max_size=40, unique=True)


@pytest.fixture(scope="module")
def definition() -> Definition:
    return load()


def record(cell: Cell, check: str, outcome: Outcome = "passed") -> dict[tuple[str, str], Record]:
    return {(cell.environment, check): Record(cell.environment, check, outcome, "2026-01-02", "abc", "m", 1.0, "d")}


def at(python: str, vllm: str, *rest: str) -> Cell:
    return Cell(python, vllm, *rest)


@given(some_cells, st.integers(1, 3), st.data())
def test_what_is_chosen_covers_what_can_go_together_and_nothing_is_run_twice(
    cells: list[Cell], strength: int, data: st.DataObject
) -> None:
    run = data.draw(st.lists(st.sampled_from(cells), unique=True))
    chosen = choose(cells, run, AXES, strength)
    assert set(chosen) <= set(cells) - set(run)
    assert len(chosen) == len(set(chosen))
    there = set().union(*(together(cell, AXES, strength) for cell in (*run, *chosen)))
    assert there >= set().union(*(together(cell, AXES, strength) for cell in cells))
    assert all(strength_of(cell, [*run, *chosen], AXES) >= strength for cell in cells)
    assert choose(cells, [*run, *chosen], AXES, strength) == []


@given(some_cells, st.sampled_from(CELLS))
def test_the_strength_is_the_most_values_that_all_ran_together(run: list[Cell], cell: Cell) -> None:
    strength = strength_of(cell, run, AXES)
    for count in range(1, len(AXES) + 1):
        covered = all(
            any(all(getattr(cell, axis) == getattr(other, axis) for axis in some) for other in run)
            for some in itertools.combinations(AXES, count)
        )
        assert covered == (count <= strength)


def test_few_pipelines_stand_for_all() -> None:
    assert len(CELLS) == 120
    assert [len(choose(CELLS, [], AXES, strength)) for strength in (1, 2, 3)] == [3, 9, 25]


def test_what_is_refused_stands_for_no_pipeline_that_runs(definition: Definition) -> None:
    definition = replace(definition, refused=(Refusal({"vllm": "0.28"}, "PlanError", "no loaders"),))
    refused = at("3.13", "0.28", "newest", "colocated", "dense", "1")
    other = at("3.13", "0.32", "newest", "colocated", "dense", "1")
    found = record(refused, refused.pipeline, "refused")
    assert stood_for(definition, other, other.pipeline, found) == 0
    assert like(definition, other, other.pipeline, found) == []
    older = at("3.13", "0.28", "0.16", "colocated", "dense", "1")
    assert like(definition, older, older.pipeline, found) == [refused]


def test_a_failure_and_a_skip_stand_for_nothing(definition: Definition) -> None:
    cell = at("3.12", "0.32", "newest", "colocated", "dense", "1")
    for outcome in ("failed", "skipped"):
        assert like(definition, cell, "light", record(cell, "light", outcome)) == []  # type: ignore[arg-type]
    assert like(definition, cell, "light", record(cell, "light")) == [cell]
    assert like(definition, cell, "megatron", record(cell, "light")) == [], "another check is another kind"


def test_what_is_recorded_is_not_chosen_again(definition: Definition) -> None:
    environments = list(definition.environments().values())
    wanted = [(cell, "light") for cell in environments]
    first = standing_for(definition, wanted, {}, 1)
    assert {cell.python for cell, _ in first} == {"3.11", "3.12", "3.13"}
    assert {cell.vllm for cell, _ in first} == {"0.28", "0.29", "0.32"}
    records = {key: value for cell, check in first for key, value in record(cell, check).items()}
    assert standing_for(definition, wanted, records, 1) == []
    assert 0 < len(standing_for(definition, wanted, records, 9)) < len(wanted), "more values than axes: all of them"
