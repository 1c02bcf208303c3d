"""The tables of the benchmarks' README are what their JSONs say."""

import importlib.util
import json
import re
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_measured_tables_are_those_of_the_runs_that_they_name(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_table", BENCHMARKS / "table.py")
    table = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, table)  # where dataclasses look for it
    spec.loader.exec_module(table)
    text = (BENCHMARKS / "README.md").read_text()
    _, _, rest = text.partition(table.BEGIN)
    shown, _, _ = rest.partition(table.END)
    names = re.findall(r"^- `(\w+\.json)`", shown, re.MULTILINE)
    assert names
    runs = {name: json.loads((BENCHMARKS / name).read_text()) for name in names}
    assert table.render(table.Results(runs)) == shown.strip()
