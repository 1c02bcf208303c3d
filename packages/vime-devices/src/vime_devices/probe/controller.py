"""The IPC probe: can a process under a given mask open memory that another exports, and is it that memory?

One exporter lives through the whole run under the present environment. For every mask, exported ordinal and arm a fresh
importer starts under that mask, opens one handle, and reports a digest of the bytes. The nonce in the memory is new for
every case and known to the exporter and this controller only, so "opened, but other memory" cannot pass for success.

Arms: ``exported`` opens on the ordinal that the exporter used, ``own`` on the importer's own first device. Outcomes:
``ok`` (the right bytes), ``wrong device`` (opened, other bytes), ``refused`` (with the runtime's words), ``timeout``.
Beside an ``ok`` stands whether the ordinal denotes the exporter's GPU in the importer: where it denotes another, the
bytes were read through a peer mapping.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from vime_devices.environment import visible_devices, with_mask
from vime_devices.errors import ProbeError
from vime_devices.identity import Source, identify
from vime_devices.masks import compose, parse_devices
from vime_devices.platforms import Platform
from vime_devices.probe.channel import Channel
from vime_devices.variables import CUDA, HIP, ROCR

SIZE = 2 << 20  # bytes: one fragment of the GPU's page tables, so that no other allocation shares it
NONCE_BYTES = 32
START_S = 180.0  # seconds for a worker to import torch and initialise the runtime
OPEN_S = 45.0  # seconds for one export or open; ROCm's own wait is 10
WORKER = (sys.executable, "-m", "vime_devices.probe.worker")


class Arm(StrEnum):
    """On which ordinal the importer opens a handle."""

    EXPORTED = "exported"
    OWN = "own"


class Outcome(StrEnum):
    """What came of one open."""

    OK = "ok"
    WRONG_DEVICE = "wrong device"
    REFUSED = "refused"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Case:
    """One open and what came of it.

    Attributes:
        mask: The importer's mask as it was asked for (indices count among the exporter's devices).
        variable: The mask as it stood in the importer's environment.
        exported: The exporter's ordinal.
        arm: Which ordinal the importer used.
        outcome: What came of it.
        denotes: ``same`` or ``other``: whether that ordinal is the exporter's GPU in the importer; empty where none.
        text: The runtime's words, or what was read.
    """

    mask: str
    variable: str
    exported: int
    arm: Arm
    outcome: Outcome
    denotes: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A whole run.

    Attributes:
        platform: Whose rules hold.
        torch: torch's version.
        runtime: The runtime's version.
        devices: The exporter's devices (ordinal, uuid, name).
        cases: The results, in the order of masks, exported ordinals and arms.
    """

    platform: str
    torch: str
    runtime: str
    devices: tuple[Mapping[str, Any], ...]
    cases: tuple[Case, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """How to run the probe.

    Attributes:
        masks: Importer masks; empty for the default matrix. ``uuid:1,0`` stands for the UUIDs of those devices.
        jobs: How many importers run at once.
        start_s: Seconds for a worker to start.
        open_s: Seconds for one export or open.
        worker: The command of a worker, to which ``export`` or ``import`` is added; empty for this package's own.
    """

    masks: Sequence[str] = ()
    jobs: int = 4
    start_s: float = START_S
    open_s: float = OPEN_S
    worker: Sequence[str] = ()


def default_masks(count: int) -> tuple[str, ...]:
    """Return the masks to try: each device alone, each first and the others after it, then the same by UUID.

    Args:
        count: How many devices the exporter has; of more than four, three stand for all.

    Returns:
        The masks, as ``ProbeOptions.masks`` takes them.
    """
    names = [str(index) for index in range(count)]
    chosen = names if count <= 4 else [names[0], names[3], names[-1]]
    first = [",".join([name, *(other for other in names if other != name)]) for name in chosen] if count > 1 else []
    masks = chosen + first
    return (*masks, *(f"uuid:{mask}" for mask in masks))


def run_probe(platform: Platform, environ: Mapping[str, str], options: ProbeOptions | None = None) -> ProbeResult:
    """Run the probe on this machine's devices.

    Args:
        platform: HIP or CUDA.
        environ: The exporter's environment; importers get it too, with their mask in place of its masks.
        options: What to try.

    Returns:
        The result.

    Raises:
        ProbeError: There is no device, or the exporter does not come up.
        MaskError: A mask that is no device list, or names a device the exporter does not have.
    """
    options = options if options is not None else ProbeOptions()
    with Channel([*(options.worker or WORKER), "export"], environ, "exporter") as channel:
        try:
            ready = channel.receive(options.start_s)
        except TimeoutError as error:
            raise ProbeError(
                "the exporter did not start",
                where="exporter",
                seen=str(error),
                expected="torch imported and the devices initialised in that time",
                fix="look for a hung driver (`rocm-smi`, `nvidia-smi`), or allow more time",
            ) from error
        if ready["event"] != "ready" or not ready["devices"]:
            raise ProbeError(
                "no device to probe",
                where="exporter",
                seen=ready.get("text", "no visible device"),
                expected="torch with at least one HIP or CUDA device",
                fix="run this where a GPU is visible; `vime-devices explain` shows the masks",
            )
        run = _Run(platform, environ, options, channel, ready["devices"])
        masks = options.masks or default_masks(len(ready["devices"]))
        plan = [
            (mask, run.variable(mask), d["ordinal"], arm) for mask in masks for d in ready["devices"] for arm in Arm
        ]
        with ThreadPoolExecutor(options.jobs) as pool:
            cases = tuple(pool.map(lambda item: run.case(*item), plan))
    return ProbeResult(platform.value, ready["torch"], ready["runtime"], tuple(ready["devices"]), cases)


@dataclass(slots=True)
class _Run:
    platform: Platform
    environ: Mapping[str, str]
    options: ProbeOptions
    exporter: Channel
    devices: Sequence[Mapping[str, Any]]
    nonces: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def variable(self, mask: str) -> str:
        """Spell a mask over the exporter's devices as it must stand in an importer's environment."""
        indices = parse_devices(self.platform, mask.removeprefix("uuid:"))
        ordinals = compose(self.platform, [str(device["ordinal"]) for device in self.devices], indices)
        if mask.startswith("uuid:"):
            return ",".join(self._uuid(int(ordinal)) for ordinal in ordinals)
        names = (CUDA,) if self.platform is Platform.CUDA else (ROCR, HIP, CUDA)
        if any(name in self.environ for name in names):
            ordinals = compose(self.platform, visible_devices(self.platform, self.environ), ordinals)
        return ",".join(ordinals)

    def case(self, mask: str, variable: str, exported: int, arm: Arm) -> Case:
        """Run one importer."""
        environ = with_mask(self.platform, self.environ, variable)
        name = f"importer under mask {variable}"
        try:
            with Channel([*(self.options.worker or WORKER), "import"], environ, name) as importer:
                ready = importer.receive(self.options.start_s)
                if ready["event"] != "ready":
                    return Case(mask, variable, exported, arm, Outcome.REFUSED, "", ready["text"])
                nonce, answer = self._export(exported)
                if answer["event"] != "exported":
                    return Case(mask, variable, exported, arm, Outcome.REFUSED, "", f"export: {answer['text']}")
                ordinal = 0 if arm is Arm.OWN else None
                denotes = self._denotes(ready["devices"], exported if ordinal is None else ordinal, exported)
                importer.send(handle=answer["handle"], ordinal=ordinal)
                outcome, text = self._judge(importer.receive(self.options.open_s), nonce)
                return Case(mask, variable, exported, arm, outcome, denotes, text)
        except TimeoutError as error:
            return Case(mask, variable, exported, arm, Outcome.TIMEOUT, "", str(error))
        except ProbeError as error:
            return Case(mask, variable, exported, arm, Outcome.REFUSED, "", f"{error.what}: {error.seen}")

    def _export(self, ordinal: int) -> tuple[bytes, dict[str, Any]]:
        """Ask for fresh memory with a fresh nonce; one request at a time."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        with self.lock:
            number = len(self.nonces)
            self.nonces[nonce.hex()] = ordinal
            self.exporter.send(number=number, ordinal=ordinal, nonce=nonce.hex(), size=SIZE)
            answer = self.exporter.receive(self.options.open_s)
            while answer["number"] != number:  # the late answer to a request that was given up
                answer = self.exporter.receive(self.options.open_s)
            return nonce, answer

    def _judge(self, answer: Mapping[str, Any], nonce: bytes) -> tuple[Outcome, str]:
        if answer["event"] != "opened":
            return Outcome.REFUSED, answer["text"]
        if answer["sha256"] == hashlib.sha256(nonce * (SIZE // NONCE_BYTES)).hexdigest():
            return Outcome.OK, ""
        other = self.nonces.get(answer["head"])
        return Outcome.WRONG_DEVICE, "unknown bytes" if other is None else f"bytes exported from ordinal {other}"

    def _denotes(self, seen: Sequence[Mapping[str, Any]], used: int, exported: int) -> str:
        if used >= len(seen):
            return ""
        return "same" if seen[used]["uuid"] == self.devices[exported]["uuid"] else "other"

    def _uuid(self, ordinal: int) -> str:
        """Spell a device's UUID as a mask of its platform takes it."""
        source = Source.TORCH_HIP if self.platform is Platform.HIP else Source.TORCH_CUDA
        return f"GPU-{identify(self.devices[ordinal]['uuid'], source).unique}"
