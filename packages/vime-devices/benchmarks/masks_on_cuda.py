"""Masks on real NVIDIA devices: the IPC probe, and what the driver and torch make of every text of the truth table.

    PYTHONPATH=packages/vime-devices/src python3 packages/vime-devices/benchmarks/masks_on_cuda.py --out results

needs torch and nothing else. It writes ``ipc.{json,md}`` (the probe over masks by index and by UUID, both arms),
``readers.{json,md}`` (one row per mask text: the devices that ``cuInit`` leaves, those that ``read_cuda`` predicts, and
the count that torch gives before it initialises, against ours) and ``snapshot.json``. The exit status is 1 where a
prediction or the importer's-own-index arm fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime_devices import Node, Platform, discover_node
from vime_devices.environment import with_mask
from vime_devices.errors import VisibilityError
from vime_devices.parsers import read_cuda, torch_count, torch_visible
from vime_devices.preflight import take_snapshot
from vime_devices.probe import Arm, Outcome, ProbeOptions, markdown, run_probe
from vime_devices.variables import CUDA, CUDA_ORDER

TEXTS = (
    None, "", "-1", "0", "1", "0,1", "1,0", "0, 1", " 0", "01", "+1", "0x1", "0x1,1", "08", "1gpu2", "0,-1,1", "0,7,1",
    "7", "0,0,1", "0,,1", "0,", ",0", "x",
    "GPU-", "{0}", "{1}", "{1},{0}", "{0:.12}", "{0},1", "1,{0}", "{0},{0}", "{0},",
)  # fmt: skip
DEADLINE_S = 120

# Asks the driver itself, without torch: cuInit, then the UUID of each device. Prints a JSON list.
DRIVER = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
code, count, found = cuda.cuInit(0), ctypes.c_int(0), []
if code == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetUuid(ctypes.byref(raw), device)
    found.append("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
print(json.dumps({"code": code, "uuids": found}))
"""

# Asks torch for its count under each text before it initialises; the variable is read anew at every call.
TORCH = """
import json, os, sys, torch
name, texts = json.loads(sys.argv[1])
counts = []
for text in texts:
    os.environ.pop(name, None)
    if text is not None:
        os.environ[name] = text
    try:
        counts.append(torch.cuda.device_count())
    except ValueError as error:
        counts.append(str(error))
assert not torch.cuda.is_initialized()
print(json.dumps({"torch": torch.__version__, "counts": counts}))
"""


def main() -> int:
    """Run all three parts and write their files.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Masks on real NVIDIA devices.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=4, help="probe importers at once")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # NVML lists by address; ask the driver to do likewise, so that both lists are comparable on any node.
    environ = {name: value for name, value in os.environ.items() if name != CUDA} | {CUDA_ORDER: "PCI_BUS_ID"}
    node = discover_node(Platform.CUDA)
    snapshot = take_snapshot("benchmark", Platform.CUDA, environ=environ, node=node)
    _write(options.out / "snapshot.json", json.dumps(snapshot.to_json(), indent=2))

    readers = census(node, environ)
    _write(options.out / "readers.json", json.dumps(readers, indent=2))
    _write(options.out / "readers.md", readers_table(readers))

    result = run_probe(Platform.CUDA, environ, ProbeOptions(jobs=options.jobs))
    _write(options.out / "ipc.json", json.dumps(result.to_json(), indent=2))
    _write(options.out / "ipc.md", markdown(result))

    wrong = [row["text"] for row in readers["rows"] if not (row["driver_as_predicted"] and row["torch_as_predicted"])]
    refused = [case for case in result.cases if case.arm is Arm.OWN and case.outcome is not Outcome.OK]
    print(f"predictions that failed: {wrong or 'none'}; own-index opens that failed: {refused or 'none'}")
    return int(bool(wrong or refused))


def census(node: Node, environ: Mapping[str, str]) -> dict[str, Any]:
    """Ask the driver and torch about every mask text, and set our readers' answers beside theirs.

    Args:
        node: The machine's devices.
        environ: The environment without a mask.

    Returns:
        The versions and one row per text.
    """
    uuids = [device.uuid for device in node.devices]
    padded = uuids * 2  # the texts name two devices; on one GPU both are the same
    texts = [None if text is None else text.format(*padded) for text in TEXTS]
    asked = _ask(["-c", TORCH, json.dumps([CUDA, texts])], environ)
    rows = []
    for text, counted in zip(texts, asked["counts"], strict=True):
        driver = _ask(["-c", DRIVER], environ if text is None else with_mask(Platform.CUDA, environ, text))
        seen = [uuids.index(uuid) for uuid in driver["uuids"]]
        reading = read_cuda(text, uuids)
        try:
            expected: int | str = len(torch_count(Platform.CUDA, torch_visible(Platform.CUDA, cuda=text), uuids))
        except VisibilityError as error:
            expected = error.what
        rows.append(
            {
                "text": text,
                "driver": seen,
                "driver_code": driver["code"],
                "read_cuda": list(reading.indices),
                "defined": reading.defined,
                "torch": counted,
                "torch_count": expected,
                # An outcome that we call undefined is not predicted; the run then records what it is.
                "driver_as_predicted": seen == list(reading.indices) or not reading.defined,
                "torch_as_predicted": counted == expected,
            }
        )
    return {"torch": asked["torch"], "devices": uuids, "rows": rows}


def readers_table(readers: Mapping[str, Any]) -> str:
    """Write the census as a Markdown table."""
    lines = [
        f"{len(readers['devices'])} devices, torch {readers['torch']}",
        "",
        "| mask | driver | `read_cuda` | torch before init | ours | as predicted |",
        "|---|---|---|---|---|---|",
    ]
    for row in readers["rows"]:
        text = "unset" if row["text"] is None else f"`{row['text']!r}`"
        read = f"{row['read_cuda']}" + ("" if row["defined"] else " (not defined)")
        good = "yes" if row["driver_as_predicted"] and row["torch_as_predicted"] else "NO"
        lines.append(f"| {text} | {row['driver']} | {read} | {row['torch']} | {row['torch_count']} | {good} |")
    return "\n".join(lines) + "\n"


def _ask(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *arguments], env=dict(environ), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"a child of the census failed with status {done.returncode}: {done.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _write(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    print(f"--- {path.name}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
