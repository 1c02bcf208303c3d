"""Stages ``mask_ab`` and ``ipc_probe``: the reference fault of colocated weight sync, and the cure, on this machine.

The fault. On ROCm 7 a HIP IPC handle carries the exporter's ordinal and is opened in the importer's list of devices.
A trainer rank that sees the whole node exports memory of GPU 3 as ordinal 3; an engine that sees GPU 3 only has no
ordinal 3 and gets ``hipErrorInvalidValue``. GPU 0 works by accident. The cure is vime-devices' mask: the engine's own
GPUs first, then every other of the node.

Arm A opens under the narrow mask, arm B under the mask that vime-devices writes. B has to work on every GPU that is
tried. A is not judged, it is the evidence: ``fault_reproduced`` says whether this runtime has the fault. On CUDA the
mask stays narrow and handles are opened on the importer's own index; that is the arm that has to work there.

Without GPUs both arms run on vime-devices' emulated runtime, and the report says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from vime_devices import Platform, child_environment, engine_mask
from vime_devices.probe import Arm, Case, Outcome, ProbeOptions, ProbeResult, markdown, run_probe
from vime_devices.testing import FakeHipError, FakeNode, FakeProcess, Line, synthetic_node

from vime_integration.accept.output import say
from vime_integration.accept.record import Acceptance, Report, Threshold
from vime_integration.accept.runs import usable_gpus

TARGET = 3  # of the published case: an engine on GPU 3 of eight
EMULATED_GPUS = 8
BYTES = 4096
PROBE_JOBS = 4


def mask_ab(acceptance: Acceptance) -> Report:
    """Run both arms for the target GPU and for GPU 0.

    Args:
        acceptance: What is accepted.
    """
    if acceptance.devices is Platform.CPU:
        return emulated_ab()
    count = usable_gpus(acceptance)
    if count < 2:
        return Report(skipped=f"{count} GPU: the fault needs a GPU other than 0, so two are the least")
    target = min(TARGET, count - 1)
    targets = (target, 0)
    narrow = {gpu: str(gpu) for gpu in targets}
    wide = {gpu: _wide(acceptance.devices, gpu, count) for gpu in targets}
    masks = list(dict.fromkeys([*narrow.values(), *wide.values()]))
    result = run_probe(acceptance.devices, os.environ, ProbeOptions(masks=masks, jobs=PROBE_JOBS))
    say(markdown(result))
    cases = {(case.mask, case.exported, case.arm): case for case in result.cases}
    # How our pipelines open a handle: on HIP as exported, on CUDA on the importer's own index.
    arm = Arm.EXPORTED if acceptance.devices is Platform.HIP else Arm.OWN
    thresholds = [_works(cases[wide[gpu], gpu, arm]) for gpu in targets]
    evidence = cases[narrow[target], target, Arm.EXPORTED]
    figures = {
        "target": target,
        "narrow_mask_opened_as_exported": evidence.outcome.value,
        "fault_reproduced": evidence.outcome is not Outcome.OK,
        "runtime": result.runtime,
        "torch": result.torch,
    }
    return Report(thresholds, figures)


def ipc_probe(acceptance: Acceptance) -> Report:
    """Open memory of every GPU under every mask of vime-devices' default matrix.

    Args:
        acceptance: What is accepted.
    """
    if acceptance.devices is Platform.CPU:
        return Report(skipped="a CPU has no device memory to share; weights travel by shared memory, see sync_bench")
    result = run_probe(acceptance.devices, os.environ, ProbeOptions(jobs=PROBE_JOBS))
    table = markdown(result)
    say(table)
    return Report(judge_probe(acceptance.devices, result), {"table": table.splitlines(), **_counts(result)})


def judge_probe(platform: Platform, result: ProbeResult) -> list[Threshold]:
    """Compare a probe with what has to hold.

    Args:
        platform: Whose rules hold.
        result: A run of the default matrix.

    Returns:
        No case read other memory or hung, and what our pipelines do works on every GPU.
    """
    wrong = [case for case in result.cases if case.outcome in (Outcome.WRONG_DEVICE, Outcome.TIMEOUT)]
    arm = Arm.EXPORTED if platform is Platform.HIP else Arm.OWN
    count = len(result.devices)
    tried = {case.mask for case in result.cases}
    ours = [
        case
        for case in result.cases
        if case.arm is arm and case.mask == _wide(platform, case.exported, count) and case.mask in tried
    ]
    failed = [case for case in ours if case.outcome is not Outcome.OK]
    return [
        Threshold("wrong memory or no answer", _list(wrong), "none", not wrong),
        Threshold("masks of vime-devices", f"{len(ours) - len(failed)} of {len(ours)} open", "all, of one or more",
                  bool(ours) and not failed),
    ]  # fmt: skip


def emulated_ab() -> Report:
    """Run both arms on the emulated runtime: eight GPUs, one tensor, a trainer that sees them all."""
    node = synthetic_node(Platform.HIP, EMULATED_GPUS)
    everything = [str(device.index) for device in node.devices]
    seen: dict[str, str] = {}
    for line in (Line.ROCM_7, Line.ROCM_6):
        for gpu in (TARGET, 0):
            child = child_environment(Platform.HIP, own=[gpu], node=everything, base={})
            narrow = {name: str(gpu) for name in child.env}  # what a launcher without the rule writes
            for arm, environ in (("narrow", narrow), ("own first", child.env)):
                seen[f"{line.value}, GPU {gpu}, {arm}"] = _emulated_open(FakeNode(node, line), gpu, environ)
    expected = dict.fromkeys(seen, "exact checksum")
    expected[f"{Line.ROCM_7.value}, GPU {TARGET}, narrow"] = "hipErrorInvalidValue"
    thresholds = [Threshold(case, text, expected[case], text == expected[case]) for case, text in seen.items()]
    mask = engine_mask(Platform.HIP, [TARGET], everything).text
    notes = ("emulated: no AMD GPU took part; the runtime's rules are those of its sources",)
    return Report(thresholds, {"mask": mask, "cases": seen, "emulated": True}, notes)


def _emulated_open(machine: FakeNode, gpu: int, environ: Mapping[str, str]) -> str:
    trainer: FakeProcess = machine.process({})
    engine: FakeProcess = machine.process(environ)
    trainer.set_device(gpu)
    memory = trainer.malloc(BYTES)
    data = os.urandom(BYTES)
    trainer.write(memory, data)
    try:
        pointer = engine.ipc_open_mem_handle(trainer.ipc_get_mem_handle(memory))
    except FakeHipError as error:
        return error.what
    return "exact checksum" if engine.read(pointer) == data else "other bytes"


def _wide(platform: Platform, gpu: int, count: int) -> str:
    return engine_mask(platform, [gpu], range(count)).text


def _works(case: Case) -> Threshold:
    text = f"{case.outcome.value} {case.text}".strip()
    return Threshold(f"GPU {case.exported} under mask {case.mask}", text, "ok", case.outcome is Outcome.OK)


def _counts(result: ProbeResult) -> dict[str, int]:
    return {outcome.value: sum(case.outcome is outcome for case in result.cases) for outcome in Outcome}


def _list(cases: Sequence[Case]) -> str:
    texts = [f"GPU {case.exported} under {case.mask} on {case.arm.value}: {case.outcome.value}" for case in cases]
    return "; ".join(texts) or "none"
