"""The ``vime-devices`` command: masks, explanations, preflight and the IPC probe.

Exit status: 0 all is well, 1 something was found, 2 the question could not be answered. ``--json`` writes one object to
stdout: ``devices`` is a list of objects with ``ordinal``, ``id`` and ``physical``, ``findings`` a list with ``code``,
``severity``, ``message`` and ``fix``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_devices.errors import DeviceError, PlatformError, TopologyError
from vime_devices.masks import engine_mask, parse_devices
from vime_devices.platforms import Platform, detect_platform
from vime_devices.topology import Node, boot_id, discover_node, read_kfd, synthetic_node


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program; by default the process's own.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        return _answer(options)
    except DeviceError as error:
        print(f"vime-devices: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`head`) has left: nothing more can be said, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2


def _answer(options: argparse.Namespace) -> int:
    status = int(options.run(options))
    sys.stdout.flush()  # here, where a reader that has left is noticed quietly
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime-devices", description="Device masks, identity and IPC preflight.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    mask = commands.add_parser("mask", help="print the mask of a process that owns some devices of a node")
    mask.add_argument("--platform", choices=["hip", "cuda"], help="default: this machine's")
    mask.add_argument("--own", required=True, help="the process's devices: 3, 0,1, 4-7 or UUIDs")
    mask.add_argument("--node", help="every device of the node; default: this machine's")
    mask.add_argument("--json", action="store_true")
    mask.set_defaults(run=_mask)

    explain = commands.add_parser("explain", help="resolve the present environment layer by layer")
    _node_options(explain)
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run=_explain)

    doctor = commands.add_parser("doctor", help="run preflight on this host, or on snapshots of several processes")
    doctor.add_argument("--snapshots", nargs="+", type=Path, metavar="FILE", help="from `vime-devices snapshot`")
    _node_options(doctor)
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)

    snapshot = commands.add_parser("snapshot", help="print what this process sees, for `doctor --snapshots`")
    snapshot.add_argument("--name", default=f"process {os.getpid()}")
    snapshot.add_argument("--own", help="the ordinals that it allocates on; default: all")
    _node_options(snapshot)
    snapshot.set_defaults(run=_snapshot)

    probe = commands.add_parser("probe-ipc", help="open memory of another process under a matrix of masks")
    probe.add_argument("--platform", choices=["hip", "cuda"], help="default: this machine's")
    probe.add_argument("--masks", nargs="+", default=[], metavar="MASK", help="importer masks; uuid:1,0 means by UUID")
    probe.add_argument("--jobs", type=int, default=4, help="importers at once (default 4)")
    probe.add_argument("--json", action="store_true")
    probe.set_defaults(run=_probe)
    return parser


def _node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", choices=["hip", "cuda"], help="default: this machine's")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", type=int, metavar="N", help="assume a node of N whole devices")
    where.add_argument("--kfd-root", type=Path, metavar="DIR", help="read this KFD topology (the folder with `nodes`)")


def _platform(options: argparse.Namespace) -> Platform:
    platform = Platform(options.platform) if options.platform else detect_platform()
    if platform is Platform.CPU:
        raise PlatformError(
            "no AMD or NVIDIA device is offered to this process",
            where="this host",
            seen="neither /dev/kfd with a GPU node nor /dev/nvidia<N>",
            expected="a GPU host, or --platform with --gpus or --kfd-root to reason about another",
            fix="pass the devices to the container, or load the driver",
        )
    return platform


def _node(options: argparse.Namespace) -> Node:
    if options.kfd_root is not None:
        if options.platform == "cuda":
            raise PlatformError(
                "a KFD tree belongs to HIP",
                where="command line",
                seen="--platform cuda --kfd-root",
                expected="one of them",
                fix="drop --platform",
            )
        return read_kfd(options.kfd_root, boot_id=boot_id())
    platform = _platform(options)
    return discover_node(platform) if options.gpus is None else synthetic_node(platform, options.gpus)


def _mask(options: argparse.Namespace) -> int:
    platform = _platform(options)
    if options.node is None:
        node: tuple[str, ...] = tuple(str(device.index) for device in discover_node(platform).devices)
    else:
        node = parse_devices(platform, options.node)
    mask = engine_mask(platform, parse_devices(platform, options.own), node)
    if options.json:
        _json({"mask": mask.text, "local_indices": mask.local_indices, "platform": platform.value})
    else:
        print(mask.text)
    return 0


def _explain(options: argparse.Namespace) -> int:
    from vime_devices.preflight import check_process, take_snapshot
    from vime_devices.report import explain_json, explain_text
    from vime_devices.resolve import resolve

    node = _node(options)
    resolution = resolve(os.environ, node)
    findings = check_process(take_snapshot("this process", node.platform, node=node))
    if options.json:
        _json(explain_json(resolution, findings))
    else:
        print(explain_text(resolution, findings))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from vime_devices.preflight import Finding, Severity, Snapshot, check_all, take_snapshot
    from vime_devices.report import doctor_json, doctor_text

    snapshots: list[Snapshot] = []
    try:
        if options.snapshots:
            snapshots = [Snapshot.from_json(_read_json(path)) for path in options.snapshots]
        else:
            node = _node(options)
            snapshots = [take_snapshot("this process", node.platform, node=node)]
        findings = check_all(snapshots)
    except (PlatformError, TopologyError) as error:  # a host without devices is an answer, not a failure to answer
        symptom = "every GPU program fails at its first device call"
        findings = [Finding("no-node", Severity.ERROR, str(error), symptom, error.fix, "this host")]
    if options.json:
        _json(doctor_json(snapshots, findings))
    else:
        print(doctor_text(snapshots, findings))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _snapshot(options: argparse.Namespace) -> int:
    from vime_devices.preflight import take_snapshot

    node = _node(options)
    own = None if options.own is None else [int(entry) for entry in parse_devices(node.platform, options.own)]
    _json(take_snapshot(options.name, node.platform, own=own, node=node).to_json())
    return 0


def _probe(options: argparse.Namespace) -> int:
    from vime_devices.probe import Outcome, ProbeOptions, markdown, run_probe

    platform = _platform(options)
    result = run_probe(platform, os.environ, ProbeOptions(masks=options.masks, jobs=options.jobs))
    if options.json:
        _json(result.to_json())
    else:
        print(markdown(result), end="")
    return int(any(case.outcome in (Outcome.WRONG_DEVICE, Outcome.TIMEOUT) for case in result.cases))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeviceError(
            "a snapshot cannot be read",
            where=str(path),
            seen=str(error),
            expected="JSON",
            fix="write it with `vime-devices snapshot`",
        ) from error


def _json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


if __name__ == "__main__":  # pragma: no cover - run as a process
    sys.exit(main())
