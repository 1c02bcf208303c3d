"""Renders the tables of results from JSONs that `gpu_table.py` wrote; a figure that was not measured says why.

Of an arm that several runs have, the last one named counts, and the text says which arm came from which. Prints the
tables, and with ``--write README.md`` puts them between the two markers of that file::

    python benchmarks/table.py benchmarks/h200.json benchmarks/h200_cuts.json --write benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True)
class Results:
    """What runs found.

    Attributes:
        runs: Each run's JSON by its file's name; of an arm that several have, the last one counts.
    """

    runs: dict[str, dict[str, Any]]

    def arms(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Every arm that found something, with the run that counts."""
        named = [(name, arm) for name, run in self.runs.items() for arm in run["arms"]]
        found = {arm["arm"]: (name, arm) for name, arm in named if not arm["rows"]}
        return found | {arm["arm"]: (name, arm) for name, arm in named if arm["rows"]}

    def arm(self, name: str) -> dict[str, Any]:
        """An arm's results; empty if it was not run."""
        return self.arms().get(name, ("", {}))[1]

    def own(self, arm: str, backend: str) -> str:
        """What vLLM's own engine took in the run that an arm is from, or else in the last run that has it, by name."""
        engine, case = f"vllm-{backend}", f"vLLM {backend}: send_weights, all of it"
        run = self.runs.get(self.arms().get(arm, ("", {}))[0], {"arms": []})
        beside = Results({"": run})
        if beside.median(engine, case) is not None:
            return beside.ms(engine, case)
        found = self.ms(engine, case)
        return found if self.median(engine, case) is None else f"{found} in `{self.arms()[engine][0]}`"

    def missing(self, name: str) -> str:
        """Why an arm has no figure."""
        arm = self.arm(name)
        why = str(arm.get("error", "")).splitlines()
        return f"not measured ({why[0][:80]})" if why else "not measured"

    def median(self, arm: str, case: str) -> float | None:
        """The median of a case in ms."""
        row = next((row for row in self.arm(arm).get("rows", []) if row["case"] == case), None)
        return None if row is None else float(row["median_ms"])

    def ms(self, arm: str, case: str) -> str:
        """A case as text, with its rate where bytes moved."""
        row = next((row for row in self.arm(arm).get("rows", []) if row["case"] == case), None)
        if row is None:
            return self.missing(arm)
        rate = f" ({row['gb_per_s']:.0f} GB/s)" if row.get("gb_per_s") else ""
        return f"{row['median_ms']:.2f} ms{rate}"

    def note(self, arm: str, key: str) -> Any:
        """A fact, or None."""
        return self.arm(arm).get("notes", {}).get(key)

    def ratio(self, arm: str, case: str, base: str) -> str:
        """How much more one case takes than another, in percent."""
        more, less = self.median(arm, case), self.median(arm, base)
        return self.missing(arm) if more is None or less is None else f"{(more / less - 1) * 100:+.1f}%"

    def gib(self, arm: str, key: str) -> str:
        """Memory that vLLM's log names."""
        found = [re.search(r"took ([\d.]+) GiB", str(line)) for line in self.note(arm, key) or []]
        return next((f"{match[1]} GiB" for match in found if match), self.missing(arm))

    def fact(self, arm: str, key: str, form: str) -> str:
        """A fact as text."""
        value = self.note(arm, key)
        return self.missing(arm) if value is None else form.format(value)


def update_table(r: Results) -> list[tuple[str, str, str, str]]:
    """Rows of (case, vLLM's own engine, to reach, measured)."""
    ipc, copied, nccl = r.own("alias", "ipc"), r.own("copy", "ipc"), r.own("copy-peer", "nccl")
    return [
        ("aliased, pause to resume, idle", ipc, "10 ms", r.ms("alias", "idle, digest off: paused")),
        ("aliased, the same with a full digest", ipc, "", r.ms("alias", "idle, digest full: paused")),
        ("aliased, under load (16 requests)", "", "a step's time", r.ms("alias", "under load: paused")),
        (
            "aliased, engine's model memory",
            r.gib("alias", "plain_memory"),
            "0.05 GiB",
            r.gib("alias", "aliased_memory"),
        ),
        ("aliased, rollout speed over plain", "1", "0.98 to 1.02", r.fact("alias", "speed_ratio", "{:.3f}")),
        ("copy on one GPU, data plane", copied, "8.8 ms", r.ms("copy", "digest off: copy")),
        ("copy on one GPU, sampled digest", "", "", r.ms("copy", "digest sampled: copy")),
        ("copy on one GPU, full digest", "", "+10%", _full(r, "copy")),
        ("copy on one GPU, pause to resume", "", "20 ms", r.ms("copy", "digest off: paused")),
        ("copy on one GPU, the same, full digest", "", "", r.ms("copy", "digest full: paused")),
        ("copy on one GPU, the same, under load", "", "", r.ms("copy", "under load, digest off: paused")),
        ("copy beside an aliased engine, data plane", ipc, "8.8 ms", r.ms("alias", "copy, digest off: copy")),
        ("the same, full digest", "", "+10%", _full(r, "alias", "copy, ")),
        ("the same, pause to resume", "", "20 ms", r.ms("alias", "copy, digest off: paused")),
        ("the same, pause to resume, full digest", "", "", r.ms("alias", "copy, digest full: paused")),
        ("extra device memory while idle", "", "none", r.fact("copy", "extra_idle_gib", "{:.3f} GiB")),
        ("GPU 0 to GPU 1, data plane, kernel", nccl, "46 ms", r.ms("copy-peer", "digest off: copy")),
        ("GPU 0 to GPU 1, data plane, `copy_`", nccl, "46 ms", r.ms("copy-peer", "copier torch, digest off: copy")),
        ("GPU 0 to GPU 1, kernel, full digest", "", "+10%", _full(r, "copy-peer")),
        ("GPU 0 to GPU 1, pause to resume", "", "", r.ms("copy-peer", "digest off: paused")),
    ]


def _full(r: Results, arm: str, prefix: str = "") -> str:
    full, off = f"{prefix}digest full: copy", f"{prefix}digest off: copy"
    return r.missing(arm) if r.median(arm, full) is None else f"{r.ms(arm, full)}, {r.ratio(arm, full, off)}"


def kernel_table(r: Results) -> list[tuple[str, str, str]]:
    """Rows of (case, on one GPU, GPU 0 to GPU 1): the data plane in one process."""
    cases = ["one copy of the whole buffer", "torch, digest off", "triton, digest off", "triton, digest sampled"]
    cases += ["triton, digest full", "triton, digest only"]
    rows = [(case, r.ms("tune", case), r.ms("tune-peer", case)) for case in cases]
    return [*rows, ("best cut, digest off", *_best(r, "off")), ("best cut, digest full", *_best(r, "full"))]


def _best(r: Results, mode: str) -> tuple[str, str]:
    found = []
    for arm in ("tune", "tune-peer"):
        rows = [
            (row["median_ms"], row["case"])
            for row in r.arm(arm).get("rows", [])
            if row["case"].startswith("tuning") and row["case"].endswith(f"digest {mode}")
        ]
        best = min(rows, default=None)
        found.append(
            r.missing(arm) if best is None else f"{best[0]:.2f} ms ({best[1].split(',')[0].removeprefix('tuning ')})"
        )
    return found[0], found[1]


def render(r: Results) -> str:
    """Both tables and what they were measured on, as markdown."""
    lines = [
        *(
            _run(name, run, [arm for arm, (where, _) in r.arms().items() if where == name])
            for name, run in r.runs.items()
        ),
        "",
        "| update of a vLLM server | vLLM's own | to reach | measured |",
        "|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in update_table(r)),
        "",
        "| data plane in one process | one GPU | GPU 0 to GPU 1 |",
        "|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in kernel_table(r)),
    ]
    for arm in ("copy", "copy-peer", "alias"):
        if r.note(arm, "changed") is not None:
            lines += ["", _checked(r, arm)]
    return "\n".join(lines)


def _run(name: str, run: dict[str, Any], arms: list[str]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    device = machine["devices"][0] if machine["devices"] else "CPU"
    return (
        f"- `{name}`: {len(machine['devices'])} x {device}, {machine['runtime']}, {versions}; shape {run['shape']}. "
        f"From it: {', '.join(f'`{arm}`' for arm in arms)}."
        + (f" ({machine['note'][:1].upper()}{machine['note'][1:]}.)" if machine.get("note") else "")
    )


def _checked(r: Results, arm: str) -> str:
    changed, restored = r.note(arm, "changed"), r.note(arm, "restored_exactly")
    return (
        f"`{arm}`: other weights gave other tokens: {'yes' if changed else 'NO'}; the first weights again gave the "
        f"first tokens and logprobs exactly: {'yes' if restored else 'NO'}."
    )


def write(text: str, path: Path) -> None:
    """Put a text between the two markers of a file.

    Raises:
        ValueError: If the file has not exactly one pair of them.
    """
    parts = re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", path.read_text())
    if parts[1::2] != [BEGIN, END]:
        raise ValueError(f"{path}: expected one {BEGIN} and one {END} after it")
    path.write_text("".join([parts[0], BEGIN, "\n", text, "\n", END, parts[4]]))


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    text = render(Results({path.name: json.loads(path.read_text()) for path in options.results}))
    for path in options.write:
        write(text, path)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
