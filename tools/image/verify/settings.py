"""Checks of the environment: what Ray makes of our masks, and what the preflight of vime-devices says of this process.

The rules themselves live in vime-devices, which owns every mask; nothing here knows a mask's name or order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from verify.context import Context
from verify.interpreters import judged
from verify.probe import ask
from verify.report import Result, passed, skipped

VENDORS = {"rocm": ("hip",), "cuda": ("cuda",), "cpu": ("hip", "cuda")}
# Megatron orders communication before computation by it; more queues than one let a kernel overtake its all-gather.
ONE_QUEUE = ("CUDA_DEVICE_MAX_CONNECTIONS", "1")

RAY_MASKS = """
import os
from vime_devices import Platform, child_environment
platform = Platform(ARGUMENT["platform"])
child = child_environment(platform, own=[3], node=range(8), base=ARGUMENT["base"])
os.environ.clear()
os.environ.update(child.env)
from ray._private.accelerators import get_all_accelerator_managers
name = {"hip": "AMD", "cuda": "NVIDIA"}[ARGUMENT["platform"]]
managers = [m for m in get_all_accelerator_managers() if m.__name__.upper().startswith(name + "GPU")]
answer({"mask": child.mask, "ray": [m.get_current_process_visible_accelerator_ids() for m in managers]})
"""

RAY_ENVIRONMENT = """
from vime_devices import Platform, ray_environment
answer(ray_environment(Platform(ARGUMENT)))
"""

DOCTOR = """
import contextlib, io
from vime_devices.cli import main
sys.argv = ["vime-devices", "doctor", "--json", *ARGUMENT]
out = io.StringIO()
code = 0
try:
    with contextlib.redirect_stdout(out):
        code = main()
except SystemExit as error:
    code = error.code
answer({"code": code, "report": json.loads(out.getvalue())})
"""


def check_settings(context: Context) -> Iterator[Result]:
    """Check masks as Ray sees them, the variables that images set, and the preflight.

    Args:
        context: The environment.

    Yields:
        ``ray-masks:*``, ``settings`` and ``preflight``.
    """
    for vendor in VENDORS[context.platform]:
        yield ray_masks(context, vendor)
    yield settings(context)
    yield preflight(context)


def ray_masks(context: Context, vendor: str) -> Result:
    """Check that Ray's accelerator manager reads the mask that vime-devices writes; no GPU is needed for it.

    The case is the one that went wrong in the field: a process that owns GPU 3 of 8.
    """
    label = f"ray-masks:{vendor}"
    base = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    reply = ask(RAY_MASKS, {"platform": vendor, "base": base}, deadline_s=context.deadline_s)
    if reply.value is None:
        return judged(context, label, [reply.problem], "", "the mask of a child that owns GPU 3 of 8")
    mask, seen = reply.value["mask"], reply.value["ray"]
    good = seen == [mask.split(",")]
    return passed(label, good, f"Ray reads {seen[0] if seen else 'nothing'}", f"{mask} as vime-devices writes it")


def settings(context: Context) -> Result:
    """Check the variables that an image sets for good."""
    label = "settings"
    if context.platform == "cpu":
        return skipped(label, context.no_device_reason, "the variables of a GPU image")
    vendor = VENDORS[context.platform][0]
    reply = ask(RAY_ENVIRONMENT, vendor, deadline_s=context.deadline_s)
    if reply.value is None:
        return judged(context, label, [reply.problem], "", "the variables that vime-devices wants for Ray")
    wanted = {**reply.value, ONE_QUEUE[0]: ONE_QUEUE[1]}
    wrong = [f"{name} is {os.environ.get(name)!r}" for name, value in wanted.items() if os.environ.get(name) != value]
    expected = ", ".join(f"{name}={value}" for name, value in sorted(wanted.items()))
    return passed(label, not wrong, "; ".join(wrong) or f"{len(wanted)} as expected", expected)


def preflight(context: Context) -> Result:
    """Let vime-devices judge this process: HSA, RCCL and IPC settings, limits, masks."""
    label, expected = "preflight", "no error from `vime-devices doctor`"
    if context.platform == "cpu":
        return skipped(label, context.no_device_reason, expected)
    # Without devices the variables can still be judged, as they would be on a node of eight.
    assumed = [] if context.has_devices else ["--platform", VENDORS[context.platform][0], "--gpus", "8"]
    reply = ask(DOCTOR, assumed, deadline_s=context.deadline_s)
    if reply.value is None:
        return judged(context, label, [reply.problem], "", expected)
    findings: list[dict[str, Any]] = reply.value["report"].get("findings", [])
    errors = [f"{f['code']}: {f['message']} (fix: {f['fix']})" for f in findings if f["severity"] == "error"]
    if not errors and reply.value["code"]:
        errors = [f"`vime-devices doctor` exited with {reply.value['code']} and named no error"]
    notes = [f["code"] for f in findings if f["severity"] != "error"]
    seen = "no error" + (" on an assumed node of 8" if assumed else "")
    return judged(context, label, errors, seen + (f"; noted: {', '.join(notes)}" if notes else ""), expected)
