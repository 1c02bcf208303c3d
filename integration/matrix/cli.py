"""Run the test matrix, or a part of it, and keep what came out.

    python integration/matrix/cli.py list
    python integration/matrix/cli.py run --where python=3.12 --where vllm=0.32 --checks light interface
    python integration/matrix/cli.py run --checks pipeline --cover 2    until every two values were run together
    python integration/matrix/cli.py run                    everything that this machine can (`make matrix`): hours
    python integration/matrix/cli.py table                  write the table in integration/README.md again

``check`` is what runs inside an environment, by hatch's scripts too. Exit: 0 where nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from vime_matrix import checks, results, table
from vime_matrix.covering import standing_for
from vime_matrix.definition import ROOT, Cell, Definition, load, select
from vime_matrix.machine import this_machine, why_no_environment, why_no_pipeline
from vime_matrix.running import Place, make_environment, present_commit, record, run_check

ENVIRONMENT_CHECKS = (*checks.UNITS, "interface")
CHECKS = (*ENVIRONMENT_CHECKS, "pipeline")


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program; by default the process's own.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    # A check is in a session of its own; leaving in order is what ends it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The test matrix of vime.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="print the cells")
    _where(listing)
    listing.set_defaults(run=_list)
    run = commands.add_parser("run", help="run what this machine can, and write the table")
    _where(run)
    run.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    run.add_argument("--cover", type=int, default=0, metavar="N", help="only what every N values together still need")
    run.add_argument("--folder", type=Path, default=ROOT / ".tools" / "matrix", help="environments and logs")
    run.add_argument("--uv", type=Path, default=None, help="the uv to use; by default one beside this Python, or found")
    run.set_defaults(run=_run)
    check = commands.add_parser("check", help="make one check with this interpreter's packages")
    check.add_argument("check", help=f"{', '.join(CHECKS)}, or a pipeline such as colocated-dense-1")
    check.add_argument("--answer", type=Path, help="write the result into this file as JSON")
    check.set_defaults(run=_check)
    commands.add_parser("table", help="write the table in integration/README.md").set_defaults(run=_table)
    return parser


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", action="append", default=[], metavar="AXIS=VALUE", help="repeatable")


def _selected(options: argparse.Namespace, definition: Definition) -> list[Cell]:
    where = dict(text.split("=", 1) for text in options.where)
    if unknown := sorted(set(where) - {field for field in Cell.__dataclass_fields__}):
        raise SystemExit(f"no axis {', '.join(unknown)}; expected {', '.join(Cell.__dataclass_fields__)}")
    return select(definition.cells, where)


def _list(options: argparse.Namespace) -> int:
    definition = load()
    for cell in _selected(options, definition):
        print(cell.name)
    for problem in definition.problems():
        print(f"problem: {problem}", file=sys.stderr)
    return int(bool(definition.problems()))


def _run(options: argparse.Namespace) -> int:
    definition = load()
    beside = Path(sys.executable).with_name("uv")
    uv = options.uv or (beside if beside.exists() else Path(shutil.which("uv") or "uv"))
    place = Place(options.folder, uv, this_machine(options.folder), present_commit())
    wanted, skipped = _planned(definition, options, place)
    results.withdraw((cell.environment, check) for cell, check in wanted)
    if options.cover:
        wanted = standing_for(definition, wanted, results.read(), options.cover)
    failed = 0
    for done in itertools.chain(skipped, _made(definition, wanted, place)):
        results.keep(done)
        failed += done.outcome == "failed"
        print(f"{done.environment} {done.check}: {done.outcome} after {done.seconds:g} s; {done.detail}", flush=True)
    table.write(definition, results.read())
    return int(bool(failed))


def _planned(
    definition: Definition, options: argparse.Namespace, place: Place
) -> tuple[list[tuple[Cell, str]], list[results.Record]]:
    """Return the checks that can be made here, by environment, and the records of those that cannot."""
    groups: dict[str, list[Cell]] = {}
    for cell in _selected(options, definition):
        groups.setdefault(cell.environment, []).append(cell)
    wanted, skipped = [], []
    for cells in groups.values():
        first = cells[0]
        reason = why_no_environment(first, place.machine, place.uv)
        planned = [(first, check, reason) for check in ENVIRONMENT_CHECKS if check in options.checks]
        if "pipeline" in options.checks:
            planned += [(c, c.pipeline, reason or why_no_pipeline(definition, c, place.machine)) for c in cells]
        wanted += [(cell, check) for cell, check, why in planned if not why]
        skipped += [record(cell, check, "skipped", place, 0.0, why) for cell, check, why in planned if why]
    return wanted, skipped


def _made(definition: Definition, wanted: list[tuple[Cell, str]], place: Place) -> Iterator[results.Record]:
    """Make checks, and yield each record as soon as it is known."""
    for _, group in itertools.groupby(wanted, key=lambda item: item[0].environment):
        checked = list(group)
        python, broken = make_environment(definition, checked[0][0], place)
        for cell, check in checked:
            if python is None:
                yield record(cell, check, "failed", place, 0.0, broken)
            else:
                refusal = definition.refusal(cell) if check == cell.pipeline else None
                yield run_check(python, cell, check, place, refusal)


def _check(options: argparse.Namespace) -> int:
    name = options.check
    if name == "pipeline":
        name = "-".join(os.environ[f"VIME_MATRIX_{axis}"] for axis in ("MODE", "MODEL", "TP"))
    if name in checks.UNITS:
        passed, detail = checks.unit(checks.UNITS[name])
    elif name == "interface":
        passed, detail = checks.interface()
    else:
        with tempfile.TemporaryDirectory(prefix="vime-matrix-") as folder:
            passed, detail = checks.pipeline(name, Path(folder))
    print(f"{'passed' if passed else 'failed'}: {detail}")
    if options.answer is not None:
        options.answer.write_text(json.dumps({"passed": passed, "detail": detail}), encoding="utf-8")
    return int(not passed)


def _table(_options: argparse.Namespace) -> int:
    table.write(load(), results.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
