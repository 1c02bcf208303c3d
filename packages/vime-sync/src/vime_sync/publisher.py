"""The trainer's side: exposes one rank's buffers and says which version they hold."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from vime_sync.aliasing import lease_holders
from vime_sync.control import ControlBlock, segment_name, sweep
from vime_sync.copying import SourceDigester
from vime_sync.digest import Digest, DigestMode
from vime_sync.errors import AliasError, StaleSourceError, VersionConflictError
from vime_sync.manifest import Manifest, describe
from vime_sync.process import identity
from vime_sync.source import WeightSource
from vime_sync.transports import SealsVersions, ServesControl, make_exporter


class Publisher:
    """Publishes a `WeightSource` from the process that holds it.

    Rank-local: every trainer rank that has something to give makes its own, gathers nothing, and hands its `manifest`
    to whoever drives the `SyncSession` (any way: a Ray return value, torch's object gather, a file).

    Example:
        >>> publisher = Publisher(WeightSource.from_module(model))   # doctest: +SKIP
        >>> session = SyncSession(["http://127.0.0.1:8000"], publisher.manifest(), deadline_s=60)   # doctest: +SKIP
        >>> publisher.stage(1); session.update(1)   # doctest: +SKIP
    """

    def __init__(
        self,
        source: WeightSource,
        transport: str = "shm",
        *,
        digest: DigestMode = "full",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Export the source's buffers.

        Args:
            source: What this rank holds. Its buffers must keep their storage until `close`.
            transport: One of ``vime_sync.transports.EXPORTERS``.
            digest: How much of every version is digested for the engines to verify.
            options: What the transport needs to know (a folder, an address); see its exporter.

        Raises:
            TransportError: If the transport cannot carry the source.
        """
        self.source, self.transport, self.digest = source, transport, digest
        self.version = -1
        sweep()
        with ExitStack() as undo:
            self._exporter = make_exporter(transport, source, options)
            undo.callback(self._exporter.close)
            pieces = sum(len(tensor.pieces) for tensor in source.tensors)
            self._control = ControlBlock(segment_name(), pieces, create=True)
            undo.callback(self._control.close)
            if isinstance(self._exporter, ServesControl):
                self._exporter.serve(self._control)
            self._digester = SourceDigester(source)
            undo.pop_all()  # it is whole: what was made for it stays
        self._identity = secrets.token_hex(8)
        self._places = {name: _place(buffer) for name, buffer in source.buffers.items()}

    def manifest(self) -> Manifest:
        """This rank's manifest (JSON only)."""
        record = {
            "publisher": self._identity,
            "process": identity(),
            "digest": self.digest,
            "control": {"segment": self._control.name, "pieces": self._control.pieces},
            "buffers": self._exporter.records(),
        }
        return describe(self.source, transport=self.transport, publisher=record)

    def stage(self, version: int) -> None:
        """Make the buffers' present content readable as `version`.

        Call it after the optimiser step, on every publishing rank, before the session's `update`. The buffers must not
        change from here until `update` has returned.

        Args:
            version: Greater than the last staged one (the same one again is allowed: a retry).

        Raises:
            VersionConflictError: If the version is older than what was staged before.
        """
        self._check_version(version)
        self._check_buffers()
        self._control.begin()
        self._exporter.flush()
        self._control.finish(version, self.digest, version, self._digester.sums(self.digest, version))
        if isinstance(self._exporter, SealsVersions):
            self._exporter.seal(version, self._control)
        self.version = version

    @property
    def staged_digest(self) -> str:
        """The digest of what this rank last staged (32 hexadecimal digits), empty if digests are off."""
        return "" if self.digest == "off" else str(Digest.total(self._control.sums()[2]))

    def _check_version(self, version: int) -> None:
        if version < 0 or version < self.version:
            raise VersionConflictError(
                "versions only rise",
                where=f"trainer rank {self.source.rank}",
                seen=str(version),
                expected=f">= {max(self.version, 0)}",
            )

    def _check_buffers(self) -> None:
        for name, buffer in self.source.buffers.items():
            if _place(buffer) != self._places[name]:
                raise StaleSourceError(
                    "a published buffer was moved or offloaded",
                    where=f"trainer rank {self.source.rank}, buffer {name}",
                    seen=_place(buffer),
                    expected=self._places[name],
                    fix="keep the storage of published buffers; publish again after a move",
                )

    @contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """A block in which the buffers are written; it stages `version` at its end.

        Readers see from its first moment that the buffers are in flux. If the block fails, or the process dies in it,
        they stay so: nobody takes what is there for a version.

        Args:
            version: What the buffers hold after the block.

        Raises:
            VersionConflictError: If the version is older than what was staged before.
        """
        self._check_version(version)
        self._control.begin()
        yield
        self.stage(version)

    def close(self, *, force: bool = False) -> None:
        """Stop publishing; engines refuse further updates from this publisher, and keep the version they serve.

        Args:
            force: Close although an engine runs on the buffers. It then refuses to serve once this process ends, and
                must not find other data there before.

        Raises:
            AliasError: If an engine runs on the buffers: they may not be freed, moved or offloaded.
        """
        holders = lease_holders(self._identity)
        if holders and not force:
            raise AliasError(
                "an engine runs on these buffers",
                where=f"trainer rank {self.source.rank}",
                seen=f"engine worker processes {holders}",
                expected="no engine that aliases them",
                fix="stop those engines first",
            )
        self._control.close()
        self._exporter.close()

    def __enter__(self) -> Publisher:
        """Use as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close(force=kind is not None)


def _place(buffer: torch.Tensor) -> str:
    """Where a buffer's storage is, and how large (empty once it was offloaded in place)."""
    return f"address {buffer.data_ptr():#x}, {buffer.untyped_storage().nbytes()} bytes"
