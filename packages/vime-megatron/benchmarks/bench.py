"""Run the benchmark arms, each in a process of its own, so that one that fails leaves the others standing.

``python bench.py --out DIR ARM [ARM ...]`` runs arms; ``A|B`` runs two one-GPU arms side by side, on GPU 0 and GPU 1.
Every arm writes ``DIR/ARM.json`` and ``DIR/ARM.log``; a table comes last. ``python bench.py --list`` names the arms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from socket import socket
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from arms import ARMS, ranks_of  # noqa: E402

# every rank is on this host, which may have no other network; and a container shows more cores than it grants
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "4"} | dict(os.environ)


def _free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(arm: str, out: Path, gpu: int) -> list[subprocess.Popen[bytes]]:
    world, port = ranks_of(arm), _free_port()
    processes = []
    for rank in range(world):
        log = (out / f"{arm}.{rank}.log").open("wb")
        command = [sys.executable, str(HERE / "worker.py"), arm, "--out", str(out)]
        command += ["--rank", str(rank), "--world", str(world), "--port", str(port), "--gpu", str(gpu + rank)]
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=LOCAL))
        log.close()
    return processes


def _finish(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait for an arm; when one rank fails or time runs out, end the others."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return "ok"
        if any(codes) or time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            return f"failed: exit codes {codes}" if any(codes) else "failed: out of time"
        time.sleep(0.1)


def _report(arm: str, out: Path, state: str, seconds: float) -> dict[str, Any]:
    path = out / f"{arm}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    print(f"== {arm}: {state} in {seconds:.0f} s", json.dumps(result.get("summary", {})), flush=True)
    if state != "ok":
        text = (out / f"{arm}.0.log").read_text(errors="replace")
        print(text[-1500:], flush=True)
    return {"arm": arm, "state": state, "seconds": round(seconds, 1), **result}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one arm")
    parser.add_argument("--total", type=float, default=3600.0, help="start no arm after this many seconds")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(ARMS))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    begun = time.monotonic()
    for group in options.arms:
        started = time.monotonic()
        if started - begun > options.total:
            print(f"== {group}: left out, {options.total:.0f} s are over", flush=True)
            continue
        running = {arm: _start(arm, options.out, gpu) for gpu, arm in enumerate(group.split("|"))}
        for arm, processes in running.items():
            state = _finish(processes, started + options.limit)
            results.append(_report(arm, options.out, state, time.monotonic() - started))
        (options.out / "all.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(f"{row['arm']:<34} {row['state']:<10} {json.dumps(row.get('summary', {}))}" for row in results))


if __name__ == "__main__":
    main()
