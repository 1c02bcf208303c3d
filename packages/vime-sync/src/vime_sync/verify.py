"""Comparing what a running engine serves with a checkpoint, by digests of the bytes that are live now.

Both sides digest the same canonical bytes (see `vime_sync.digest`): the engine reads its live parameters through the
plan backwards, so a fused, sharded or padded layout makes no difference, and no weight travels. It is the engine's
memory that is digested at the time of the question, not a value remembered from the last sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vime_sync.agree import divide
from vime_sync.client import EngineClient
from vime_sync.digest import Digest, digest_box
from vime_sync.errors import EmptyUpdateError, ManifestError
from vime_sync.layout import DTYPES, CheckpointTensor, Piece, Region, contiguous_strides, dtype_name, whole
from vime_sync.model import Model, plan_model
from vime_sync.source import WeightSource


@dataclass(frozen=True)
class Comparison:
    """What an engine serves, compared with a checkpoint.

    Attributes:
        url: The engine.
        version: The version that it serves.
        matching: Names of tensors that are equal, byte for byte.
        differing: Names of those that are not.
        unread: Names of those of which the engine holds only a part or nothing, so that nothing can be said.
        digest: The digest of the matching tensors' bytes.
    """

    url: str
    version: int
    matching: tuple[str, ...]
    differing: tuple[str, ...]
    unread: tuple[str, ...]
    digest: str

    @property
    def equal(self) -> bool:
        """Whether every tensor that the engine holds is the checkpoint's, and there is one."""
        return bool(self.matching) and not self.differing


def compare(url: str, source: WeightSource, *, deadline_s: float) -> Comparison:
    """Ask an engine for the digests of its live bytes and compare them with a whole checkpoint.

    Args:
        url: Base URL of the vLLM server.
        source: Every tensor whole on this rank.
        deadline_s: Seconds for the request.

    Returns:
        The comparison. Nothing is written, and a trainer that is connected stays so.

    Raises:
        SyncError: If the engine cannot answer: unknown names, another shape or dtype, asleep, torn.
    """
    ours = {
        tensor.name: sum(
            (
                Digest.from_tensor(digest_box(source.view(p.region), p.box, tensor.shape, tensor.name))
                for p in tensor.pieces
            ),
            Digest(),
        )
        for tensor in source.tensors
    }
    described = [{"name": t.name, "dtype": dtype_name(t.dtype), "shape": list(t.shape)} for t in source.tensors]
    client = EngineClient(url, deadline_s)
    try:
        reply = client.call("verify", {"tensors": described, "deadline_s": deadline_s})
    finally:
        client.close()
    theirs = {str(name): Digest.parse(str(text)) for name, text in reply["digests"].items()}
    same = tuple(name for name in ours if theirs.get(name) == ours[name])
    return Comparison(
        url=url,
        version=int(reply["version"]),
        matching=same,
        differing=tuple(name for name in ours if name in theirs and theirs[name] != ours[name]),
        unread=tuple(name for name in ours if name not in theirs),
        digest=str(sum((ours[name] for name in same), Digest())),
    )


def live_digests(model: Model, message: Mapping[str, Any]) -> dict[str, Any]:
    """An engine worker's answer: the digest of each slice of a checkpoint that it holds.

    Args:
        model: The worker's model.
        message: ``{"tensors": [{"name", "dtype", "shape"}]}``.

    Returns:
        ``{"slices": [...], "sums": [...]}``, one entry a slice (JSON).

    Raises:
        SyncError: If the tensors do not fit the model.
    """
    plan = plan_model(model, _read(message.get("tensors")), reload=True)  # what is not a copy is not read either
    live = model.live()
    slices, sums = [], []
    with torch.no_grad():
        for copy in plan.copies:
            base = live[copy.live].data
            view = base.as_strided(copy.view.shape, copy.view.strides, base.storage_offset() + copy.view.offset)
            slices.append([copy.tensor, list(copy.box.start), list(copy.box.shape), list(copy.full)])
            sums.append(str(Digest.from_tensor(digest_box(view, copy.box, copy.full, copy.tensor))))
    return {"slices": slices, "sums": sums}


def _read(records: Any) -> tuple[CheckpointTensor, ...]:
    """Tensors by their description alone, each as if it were one contiguous region."""
    if not isinstance(records, list):
        raise ManifestError("malformed message", where="tensors", seen=repr(records)[:80], expected="a list")
    if not records:
        raise EmptyUpdateError("no tensor is named")
    tensors = []
    for record in records:
        if not isinstance(record, dict) or record.get("dtype") not in DTYPES:
            raise ManifestError("malformed message", where="tensors", seen=repr(record)[:80])
        shape = record.get("shape")
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ManifestError("malformed message", where="tensors", seen=repr(record)[:80])
        at = tuple(shape)
        piece = Piece(whole(at), Region(0, "", 0, at, contiguous_strides(at)))
        tensors.append(CheckpointTensor(str(record.get("name")), at, DTYPES[record["dtype"]], (piece,)))
    return tuple(tensors)


def join_digests(replies: list[dict[str, Any]]) -> dict[str, str]:
    """Add up the workers' slices, each element once.

    Args:
        replies: What `live_digests` gave on each worker.

    Returns:
        The digest of each tensor that the workers together hold whole.
    """
    shares = divide({r["rank"]: [tuple(item) for item in r["slices"]] for r in replies})
    whole_names = set(shares["verified"])
    totals = dict.fromkeys(shares["verified"], Digest())
    for reply in replies:
        skipped = set(shares["skipped"][str(reply["rank"])])
        for index, (item, text) in enumerate(zip(reply["slices"], reply["sums"], strict=True)):
            if index not in skipped and item[0] in whole_names:
                totals[item[0]] += Digest.parse(text)
    return {name: str(digest) for name, digest in totals.items()}
