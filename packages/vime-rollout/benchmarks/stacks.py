"""What a process does with its time: py-spy's stacks, each put into the first class that one of its frames is of.

py-spy takes threads that wait for a lock for busy ones. What such threads wait in is named here and left out.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Frames of threads that only wait; a stack that ends in one is no work.
WAITING = ("_worker (concurrent", "select (selectors", "wait (threading", "_read_line (vime")
#: What the measurement does beside rollouts: it draws and encodes prompts.
OUTSIDE = ("EpochSource.", "Encoder.encode")

#: Class of work: names in a frame, the first that fits. Stacks run from the outermost frame inwards.
CLIENT: Mapping[str, tuple[str, ...]] = {
    "connection pools": ("_assign_requests_to_connections",),
    "JSON": ("json/", "to_wire"),
    "HTTP": ("EngineClient._once",),
    "checking answers": ("parse_generation", "EngineClient."),
    "handing to graders": ("rewards/",),
    "making samples": ("assemble", "Sample.", "single_turn"),
    "event loop and tasks": ("",),
}
SERVER: Mapping[str, tuple[str, ...]] = {
    "giving the request to the core": ("AsyncLLM.add_request", "InputProcessor"),
    "outputs of the core": ("output_handler", "process_outputs_socket"),
    "answer": ("serve_tokens_full_generator", "JSONResponse"),
    "parsing the request": ("solve_dependencies", "preprocess_", "validate_json_request", "get_request_handler"),
    "HTTP and middleware": ("uvicorn/", "starlette/", "fastapi/", "prometheus_fastapi"),
    "event loop and the rest": ("",),
}
#: The same two processes while many tokens come, finer (``token_cost.py``).
SERVER_TOKENS: Mapping[str, tuple[str, ...]] = {
    "answer: objects for every token": ("_create_tokens_logprobs",),
    "answer: dictionaries, JSON": ("JSONResponse", "model_dump", "json/encoder"),
    "unpacking what the core sent": ("serial_utils",),
    "statistics": ("_update_stats_from", "IterationStats", "LoRARequestStates", "StatLogger", "vllm/v1/metrics"),
    "logprobs": ("LogprobsProcessor", "append_logprobs"),
    "detokenizer (off)": ("detokenizer",),
    "outputs of the core, the rest": ("output_handler", "process_outputs_socket", "get_output_async"),
    "requests, HTTP, event loop": ("",),
}
CORE_TOKENS: Mapping[str, tuple[str, ...]] = {
    "sending outputs (a thread)": ("process_output_sockets",),
    "receiving requests (a thread)": ("process_input_sockets",),
    "model": ("_model_forward", "models/", "compute_logits"),
    "sampling and its bookkeeping": ("sample_tokens",),
    "inputs of the model": ("execute_model",),
    "scheduling": ("schedule (", ".schedule"),
    "update_from_output": ("update_from_output",),
    "the rest": ("",),
}


class Recorder:
    """Records the stacks of a process until it is stopped.

    Args:
        py_spy: The program.
        pid: Of the process.
        out: File for the stacks.
    """

    def __init__(self, py_spy: str, pid: int, out: Path) -> None:
        """Start to record."""
        self._out = out
        command = [py_spy, "record", "--nonblocking", "-r", "200", "-f", "raw", "-d", "600", "-o", str(out)]
        self._process = subprocess.Popen(
            [*command, "-p", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop(self, classes: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Stop, and return the share of each class of work."""
        self._process.send_signal(2)
        self._process.wait(60)
        return shares(self._out.read_text(encoding="utf-8").splitlines(), classes)


def shares(stacks: Sequence[str], classes: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the share of each class in stacks of the form ``outer;inner;... count``."""
    counts: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        leaf = stack.rpartition(";")[2]
        if not any(name in leaf for name in WAITING) and not any(name in stack for name in OUTSIDE):
            counts[_class_of(stack, classes)] += int(count)
    total = sum(counts.values())
    return {name: counts[name] / total for name in classes} if total else {}


def _class_of(stack: str, classes: Mapping[str, Sequence[str]]) -> str:
    return next(name for name, marks in classes.items() if any(mark in stack for mark in marks))
