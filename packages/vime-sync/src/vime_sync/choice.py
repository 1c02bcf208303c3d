"""Which transport and which way of writing fit a placement, and why.

A training loop knows where its processes run; this module knows what each transport can carry. `choose_transport` puts
the two together before anything is started, because aliased engines must be started so (`Choice.weights`), and says in
words why it chose and, above all, why engines are *not* aliased.

====================================  ==============================  ====================================
placement                             transport                       can alias
====================================  ==============================  ====================================
CPU, one host                         ``shm``                         yes: one memory
GPU, one host                         ``ipc``                         if trainer and engine share devices
several hosts                         ``collective`` (gloo; NCCL)     no: nothing is mapped
several hosts, shared file system     ``disk``, ``delta`` (asked)     no: nothing is mapped
====================================  ==============================  ====================================

What the placement allows the layout may still forbid. Only the engine can tell, from its model's own loaders, when it
starts: `SyncSession.connect` then reports ``alias_refused`` in the plan of an engine that was started with
``weights="auto"`` and has weights of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime_devices import Platform

from vime_sync.errors import AliasError, TransactionError, TransportError
from vime_sync.transports import EXPORTERS

WriteMode = Literal["copy", "alias"]
#: What maps the trainer's memory into the engine.
_MAPPED = ("shm", "ipc")


@dataclass(frozen=True)
class Choice:
    """What `choose_transport` chose.

    Attributes:
        transport: For `Publisher`.
        mode: ``"copy"`` or ``"alias"``: what the engines will do if the layout allows it.
        reasons: Why, a sentence each.
        alias_refused: Why the engines will not be aliased, a sentence each; empty if they may be, or nobody wants it.
        weights: For `engine_arguments`: ``"dummy"``, ``"auto"`` or ``"alias"``. The last two need the trainer's merged
            manifest in a file before the engine starts, and a trainer that writes inside `SyncSession.writing`.
    """

    transport: str
    mode: WriteMode
    reasons: tuple[str, ...]
    alias_refused: tuple[str, ...] = ()
    weights: Literal["dummy", "auto", "alias"] = "dummy"

    def __str__(self) -> str:
        """One line for a log."""
        refused = f"; not aliased: {'; '.join(self.alias_refused)}" if self.alias_refused else ""
        return f"transport {self.transport}, mode {self.mode}: {'; '.join(self.reasons)}{refused}"


def choose_transport(
    platform: Platform | str,
    *,
    same_devices: bool,
    same_host: bool = True,
    transport: str = "auto",
    mode: str = "auto",
    quantized: bool = False,
    sleep_mode: bool = False,
) -> Choice:
    """Choose how weights get from the trainer into its engines.

    Args:
        platform: What both run on: ``"cpu"``, ``"cuda"`` or ``"hip"``.
        same_devices: Every engine worker runs on the device (of a CPU: in the memory) that holds its weights in the
            trainer; compare with ``vime_devices.relation``, never by ordinals.
        same_host: All trainer ranks and engines are on one host.
        transport: ``"auto"``, or the one to use.
        mode: ``"alias"`` (or refuse), ``"copy"``, or ``"auto"``: alias where placement and layout allow it.
        quantized: The engines serve another format than the trainer holds.
        sleep_mode: The engines were told that their weights may be offloaded.

    Returns:
        The choice, with its reasons.

    Raises:
        TransportError: If the transport that was asked for cannot carry this placement.
        AliasError: If ``mode="alias"`` was asked for and cannot be; with every reason.
        TransactionError: If a name is unknown.
    """
    kind = _platform(platform)
    if mode not in ("auto", "copy", "alias"):
        raise TransactionError("unknown mode", seen=repr(mode), expected="auto, copy or alias")
    chosen, reasons = _transport(kind, transport, same_host=same_host)
    refused = _obstacles(
        kind, chosen, same_devices=same_devices, same_host=same_host, quantized=quantized, sleep_mode=sleep_mode
    )
    if mode == "alias" and refused:
        raise AliasError(
            "the engines cannot be aliased where they are",
            where=f"transport {chosen} on {kind.value}",
            seen="; ".join(refused),
            expected="each engine worker on the memory that holds its weights in the trainer",
            fix='place them so, or use mode "auto" or "copy"',
        )
    aliased = mode != "copy" and not refused
    if aliased:
        reasons.append("the engines can run on the trainer's memory, so a sync moves nothing")
    elif mode == "copy":
        reasons.append("a copy was asked for")
    return Choice(
        transport=chosen,
        mode="alias" if aliased else "copy",
        reasons=tuple(reasons),
        alias_refused=tuple(refused) if mode == "auto" else (),
        weights="dummy" if not aliased else "alias" if mode == "alias" else "auto",
    )


def _platform(name: Platform | str) -> Platform:
    try:
        return Platform(name)
    except ValueError as cause:
        raise TransactionError(
            "unknown platform", seen=repr(name), expected=", ".join(p.value for p in Platform)
        ) from cause


def _transport(kind: Platform, asked: str, *, same_host: bool) -> tuple[str, list[str]]:
    """The transport, and why."""
    if asked == "auto":
        if not same_host:
            return "collective", ["trainer and engines are on several hosts (give each publisher its host's address)"]
        if kind is Platform.CPU:
            return "shm", ["weights are in the CPU memory of one host"]
        unconfirmed = " (HIP IPC is unconfirmed on hardware)" if kind is Platform.HIP else ""
        return "ipc", [f"weights are in the device memory of one host{unconfirmed}"]
    if asked not in EXPORTERS:
        raise TransportError("unknown transport", seen=repr(asked), expected=f"auto, {', '.join(EXPORTERS)}")
    wrong = {"shm": kind is not Platform.CPU, "ipc": kind is Platform.CPU}
    if wrong.get(asked):
        raise TransportError(
            "this transport does not carry such memory",
            where=asked,
            seen=f"weights on {kind.value}",
            expected="CPU memory for shm, device memory for ipc",
            fix='use transport "auto"',
        )
    if asked in _MAPPED and not same_host:
        raise TransportError(
            "this transport maps memory, which only one host has",
            where=asked,
            seen="trainer and engines on several hosts",
            fix='use transport "auto", "collective", or "disk" on a shared file system',
        )
    return asked, ["the transport was asked for"]


def _obstacles(
    kind: Platform, transport: str, *, same_devices: bool, same_host: bool, quantized: bool, sleep_mode: bool
) -> list[str]:
    """Why engines cannot run on the trainer's memory."""
    found = []
    if transport not in _MAPPED:
        found.append(f"the {transport} transport maps no memory")
    if not same_host:
        found.append("trainer and engines are on several hosts")
    elif not same_devices:
        where = "memory" if kind is Platform.CPU else "devices"
        found.append(f"some engine worker runs on other {where} than the trainer's weights")
    if quantized:
        found.append("the engines' weights are quantised, the trainer's are not")
    if sleep_mode:
        found.append("sleep mode takes an engine's weights away, and these would be the trainer's")
    return found
