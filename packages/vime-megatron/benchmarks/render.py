"""Render the tables of this folder's README from the JSON of a run: ``python render.py DIR``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _training(results: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for name, result in results.items():
        summary = result.get("summary", {})
        if "tok_s" in summary:
            cells = [summary[key] for key in ("tok_s", "tflops_6n_gpu", "ms", "peak_gb")]
            rows.append([name, result["choices"]["attention"], result["settings"]["recompute"], *cells])
    return rows


def _offload(results: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for name, result in results.items():
        for number, cycle in enumerate(result.get("offload", []), start=1):
            out, back = cycle["out"], cycle["back"]
            held = out["bytes_copied"] + out["bytes_dropped"]
            rates = [round(move["bytes_copied"] / move["seconds"] / 1e9, 1) for move in (out, back)]
            share = f"{out['device_bytes'] / held:.1%}"
            rows.append([name, number, round(held / 1e9, 1), round(out["device_bytes"] / 1e9, 1), share, *rates])
    return rows


def _cases(result: dict[str, Any]) -> str:
    """Show the cases of one measurement of steps; a case that failed shows its error."""
    cases = {name: case for name, case in result.items() if isinstance(case, dict) and name != "summary"}
    keys = list(dict.fromkeys(key for case in cases.values() for key in case))
    return _table(["case", *keys], [[name, *(case.get(key, "") for key in keys)] for name, case in cases.items()])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    paths = sorted(parser.parse_args().folder.glob("*.json"))
    loaded = {path.stem: json.loads(path.read_text()) for path in paths}
    results = {name: result for name, result in loaded.items() if isinstance(result, dict)}  # all.json is a list
    head = ["arm", "attention", "recompute", "tok/s", "TFLOP/s (6N) a GPU", "ms a step", "peak GB"]
    print("### Training\n\n" + _table(head, _training(results)))
    head = ["arm", "cycle", "held GB", "freed GB", "freed", "out GB/s", "back GB/s"]
    print("\n### Offload\n\n" + _table(head, _offload(results)))
    for name, result in results.items():
        if "settings" not in result:
            print(f"\n### {name.capitalize()}\n\n" + _cases(result))


if __name__ == "__main__":
    main()
