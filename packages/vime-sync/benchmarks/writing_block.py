"""What a block of aliased weights costs, this tree beside another one, on the CPU engine, in turns.

An empty block moves nothing and computes nothing, so what is timed is the protocol: requests, rounds of the workers,
calls of the engine. Both trees serve the same tiny model from their own trainer's memory, each from processes that
import only that tree; they are measured in turns so that whatever drifts drifts for both. Figures of a GPU engine are
others: this compares two trees and nothing else.

    python benchmarks/writing_block.py --before OTHER/packages --out writing_block_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
SHAPE = "tiny"


def side(work: Path) -> None:
    """One tree: start an aliased engine, then run blocks as it is told to; a line in, a line out."""
    import torch
    from servers import Server
    from shapes import config_of, make_trainer, model_folder
    from vime_sync import Publisher, SyncSession, engine_arguments

    trainer = make_trainer(SHAPE, torch.device("cpu"))
    publisher = Publisher(trainer.source, digest="off")
    publisher.stage(0)
    path = work / "manifest.json"
    path.write_text(json.dumps(publisher.manifest()))
    arguments = [*engine_arguments(weights="alias", manifest=path), "--enforce-eager"]
    with Server(model_folder(SHAPE, work / SHAPE), arguments, work=work, dtype=config_of(SHAPE)["dtype"]) as server:
        session = SyncSession([server.url], publisher.manifest(), deadline_s=60)
        session.connect()
        version = 0
        _say({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            publisher.digest = order["digest"]
            walls, paused = [], []
            for _ in range(order["blocks"]):
                version += 1
                started = time.perf_counter()
                with session.writing(version) as block, publisher.writing(version):
                    pass
                walls.append(round((time.perf_counter() - started) * 1e3, 3))
                assert block.report is not None
                paused.append(round(block.report.phases["paused"] * 1e3, 3))
            _say({"block_ms": walls, "paused_ms": paused})
        session.close()
    publisher.close(force=True)


def _say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


class Side:
    """A tree's process."""

    def __init__(self, name: str, packages: Path, work: Path) -> None:
        """Start it; `ready` waits until its engine serves."""
        self.name = name
        work.mkdir(parents=True)
        path = os.pathsep.join(str(packages / part / "src") for part in ("vime-sync", "vime-devices"))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "writing_block.py"), "--side", str(work)],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.found: dict[str, dict[str, list[float]]] = {}

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def ready(self) -> None:
        """Wait."""
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, digest: str, blocks: int) -> None:
        """Run some blocks; the first of each turn is not counted."""
        self._pipe(self._process.stdin).write(json.dumps({"digest": digest, "blocks": blocks + 1}) + "\n")
        self._pipe(self._process.stdin).flush()
        answer = self._answer()
        kept = self.found.setdefault(f"digest {digest}", {"block_ms": [], "paused_ms": []})
        for key in kept:
            kept[key] += answer[key][1:]

    def stop(self) -> None:
        """End it."""
        self._pipe(self._process.stdin).close()
        self._process.wait(60)

    def summary(self) -> dict[str, Any]:
        """Medians and all values."""
        return {
            case: {
                **{f"{key}_median": round(statistics.median(values), 3) for key, values in found.items()},
                **{f"{key}_least": min(values) for key, values in found.items()},
                **found,
            }
            for case, found in self.found.items()
        }


def main() -> None:
    """Measure both trees in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=Path, help="internal: be one tree")
    parser.add_argument("--before", type=Path, help="the folder packages/ of the other tree")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=15)
    options = parser.parse_args()
    if options.side:
        side(options.side)
        return
    with tempfile.TemporaryDirectory(prefix="vime-block-") as folder, ExitStack() as stack:
        sides = []
        for name, packages in (("before", options.before), ("after", HERE.parents[1])):
            sides.append(Side(name, packages.absolute(), Path(folder) / name))
            stack.callback(sides[-1].stop)
        for one in sides:
            one.ready()
        for digest in ("off", "full"):
            for _ in range(options.turns):
                for one in sides:
                    one.run(digest, options.blocks)
        cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        result = {
            "machine": {
                "cpu": cpu.split(":")[1].strip(),
                "cores": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 1),
                "python": platform.python_version(),
            },
            "shape": SHAPE,
            **{one.name: one.summary() for one in sides},
        }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("before", "after"):
        for case, found in result[name].items():
            print(name, case, {key: value for key, value in found.items() if key.endswith(("median", "least"))})


if __name__ == "__main__":
    main()
