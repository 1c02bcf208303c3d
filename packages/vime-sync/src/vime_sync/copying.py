"""Executing a plan: every slice copied once, and digested as it landed.

On a CPU each slice is one `copy_`. The digest is taken from the destination after the copy, so that it speaks of the
bytes that the engine will serve; only a slice that was converted to another dtype is digested at its source.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vime_sync.digest import Digest, DigestMode, digest_box
from vime_sync.plan import Copy, Plan
from vime_sync.transports import BufferKey


class CopyProgram:
    """A plan bound to memory: source buffers on one side, live tensors (or their shadows) on the other."""

    def __init__(self, plan: Plan, buffers: Mapping[BufferKey, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        """Resolve every copy to a pair of views.

        Args:
            plan: What goes where.
            buffers: Flat source buffers by (rank, buffer).
            into: Destination tensors by live name.
        """
        self.plan = plan
        self._into = {name: tensor.detach() for name, tensor in into.items()}
        self._pairs = [
            (
                buffers[(c.source.rank, c.source.buffer)].as_strided(c.source.shape, c.source.strides, c.source.offset),
                _within(self._into[c.live], c.view.shape, c.view.strides, c.view.offset),
            )
            for c in plan.copies
        ]

    def run(self, *, digest: DigestMode, phase: int) -> list[Digest]:
        """Copy everything.

        Args:
            digest: How much to digest.
            phase: The sampling phase.

        Returns:
            One digest a copy; empty when `digest` is off.
        """
        with torch.no_grad():
            for fill in self.plan.fills:
                view = fill.live_view
                _within(self._into[fill.live], view.shape, view.strides, view.offset).fill_(fill.value)
            for source, target in self._pairs:
                target.copy_(source)
            if digest == "off":
                return []
            return [
                Digest.from_tensor(self._digest(copy, source, target, digest, phase))
                for copy, (source, target) in zip(self.plan.copies, self._pairs, strict=True)
            ]

    @staticmethod
    def _digest(copy: Copy, source: torch.Tensor, target: torch.Tensor, mode: DigestMode, phase: int) -> torch.Tensor:
        landed = target if target.dtype == copy.dtype else source
        return digest_box(landed, copy.box, copy.full, copy.tensor, mode=mode, phase=phase)


def _within(base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return base.as_strided(shape, strides, base.storage_offset() + offset)
