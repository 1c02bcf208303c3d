"""What every arm needs: where results go, servers of its shape, its turn, and a clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from servers import Server
from shapes import config_of, model_folder

GB = 1e9
#: Captured graphs without compilation: decoding only, few sizes.
GRAPHS = [
    "--compilation-config",
    json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}),
]


class Record:
    """Rows of results, written to a file after each addition."""

    def __init__(self, path: Path, arm: str, shape: str) -> None:
        """Start a file."""
        self._path = path
        self._data: dict[str, Any] = {"arm": arm, "shape": shape, "rows": [], "notes": {}, "error": ""}

    def row(self, case: str, milliseconds: Iterable[float], nbytes: int = 0, **more: Any) -> None:
        """Add repeated timings of one case."""
        values = [round(v, 3) for v in milliseconds]
        best, middle = min(values), sorted(values)[len(values) // 2]
        row = {"case": case, "ms": values, "median_ms": middle, "min_ms": best, **more}
        if nbytes:
            row["gb_per_s"] = round(nbytes / GB / (middle / 1e3), 1)
        self._data["rows"].append(row)
        rate = f" {row['gb_per_s']} GB/s" if nbytes else ""
        print(f"  {case}: median {middle:.2f} ms, min {best:.2f}{rate} {more or ''}", flush=True)
        self.write()

    def note(self, **more: Any) -> None:
        """Add facts."""
        self._data["notes"] |= more
        print(f"  {more}", flush=True)
        self.write()

    def fail(self, text: str) -> None:
        """Say why the arm ended early."""
        self._data["error"] = text
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self._data, indent=1))


@dataclass(frozen=True)
class Setting:
    """What every arm gets.

    Attributes:
        record: Where results go.
        shape: The model shape.
        work: A folder for this arm only.
        gate: Where the arm says that it is ready and is told to go on; None to go on at once.
        eager: Start no engine with captured graphs (a second attempt).
    """

    record: Record
    shape: str
    work: Path
    gate: Path | None
    eager: bool

    def ready(self, deadline_s: float = 480.0) -> None:
        """Wait for this arm's turn.

        Raises:
            RuntimeError: If it does not come in time.
        """
        if self.gate is None:
            return
        (self.gate / "ready").touch()
        end = time.monotonic() + deadline_s
        while not (self.gate / "go").exists():
            if time.monotonic() > end:
                raise RuntimeError(f"no turn within {deadline_s:.0f} s")
            time.sleep(0.05)

    def server(self, arguments: list[str], *, device: int = 0, graphs: bool = False, plugin: bool = True) -> Server:
        """Start a server of the shape."""
        captured = graphs and not self.eager and torch.cuda.is_available()
        more = GRAPHS if captured else ["--enforce-eager"]
        folder = model_folder(self.shape, self.work / self.shape)
        dtype = config_of(self.shape)["dtype"]
        return Server(folder, [*arguments, *more], work=self.work, device=device, dtype=dtype, plugin=plugin)


def clock(run: Callable[[], Any], times: int, *, warm: int = 2) -> list[float]:
    """Milliseconds of each of several runs."""
    result = []
    for index in range(warm + times):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        if index >= warm:
            result.append((time.perf_counter() - started) * 1e3)
    return result


def synchronize() -> None:
    """Wait for every device."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def free_gib(index: int = 0) -> float:
    """Free memory of a device, whoever uses the rest."""
    return round(torch.cuda.mem_get_info(index)[0] / 2**30, 3) if torch.cuda.is_available() else 0.0
