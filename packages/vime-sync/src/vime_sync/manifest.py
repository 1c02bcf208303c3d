"""Manifests: a source described in JSON, and many ranks' descriptions joined into one.

A manifest has three parts::

    {"format": 1, "transport": "shm",
     "sources": [{"rank": 0, "publisher": "5f..", "control": {...}, "buffers": {"flat": {"dtype", "numel", "handle"}}}],
     "tensors": [{"name", "dtype", "shape", "pieces": [{"start", "shape", "rank", "buffer", "offset", "strides"}]}]}

A rank's own manifest lists one source. `merge_manifests` joins them: the pieces of a tensor must tile it exactly; boxes
held by several ranks (data-parallel replicas) are taken from the rank that so far has the fewest bytes to give, and the
others are kept beside it (``"replicas"``): an engine that is nearer to them reads there (`vime_sync.striping`). The
index of a piece in its rank's own manifest is kept (``"index"``): it is where that rank publishes the piece's digest.

Everything a peer sends is untrusted: `check_manifest` validates shape, types, ranges and completeness before any use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vime_sync.errors import EmptyUpdateError, ManifestError
from vime_sync.layout import DTYPES, Box, CheckpointTensor, Piece, Region, dtype_name, first_overlap
from vime_sync.source import WeightSource

FORMAT = 1

Manifest = dict[str, Any]


def describe(source: WeightSource, *, transport: str, publisher: dict[str, Any]) -> Manifest:
    """Write the manifest of one rank.

    Args:
        source: What the rank holds.
        transport: The transport's name.
        publisher: The source record of the transport: ``publisher``, ``control``, and ``buffers`` with handles.

    Returns:
        A JSON-only dict.
    """
    index = 0
    tensors = []
    for tensor in source.tensors:
        pieces = []
        for piece in tensor.pieces:
            pieces.append(
                {
                    "start": list(piece.box.start),
                    "shape": list(piece.box.shape),
                    "rank": source.rank,
                    "buffer": piece.region.buffer,
                    "offset": piece.region.offset,
                    "strides": list(piece.region.strides),
                    "index": index,
                }
            )
            index += 1
        tensors.append(
            {
                "name": tensor.name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "pieces": pieces,
            }
        )
    return {
        "format": FORMAT,
        "transport": transport,
        "sources": [{"rank": source.rank, **publisher}],
        "tensors": tensors,
    }


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Join the manifests of all publishing ranks.

    Args:
        manifests: One a rank, in any order.

    Returns:
        A manifest in which every tensor is whole; the same for any order.

    Raises:
        ManifestError: If transports, shapes or dtypes disagree, a rank appears twice, boxes overlap without being
            equal, or a tensor has a hole.
        EmptyUpdateError: If no rank names a tensor.
    """
    if not manifests:
        raise EmptyUpdateError("no manifest to merge")
    for manifest in manifests:
        _check_envelope(manifest)
    manifests = sorted(manifests, key=lambda m: min((int(s["rank"]) for s in m["sources"]), default=-1))
    transports = {m["transport"] for m in manifests}
    if len(transports) != 1:
        raise ManifestError("ranks publish over different transports", seen=str(sorted(transports)))
    sources = sorted((s for m in manifests for s in m["sources"]), key=lambda s: int(s["rank"]))
    ranks = [s["rank"] for s in sources]
    if len(set(ranks)) != len(ranks):
        raise ManifestError("a rank published twice", seen=str(ranks), fix="give each publishing rank its own number")
    joined: dict[str, Manifest] = {}
    for manifest in manifests:
        for tensor in manifest["tensors"]:
            known = joined.setdefault(tensor["name"], {**tensor, "pieces": []})
            for key in ("shape", "dtype"):
                if known[key] != tensor[key]:
                    raise ManifestError(
                        f"ranks disagree about a tensor's {key}",
                        where=f"tensor {tensor['name']}, ranks {ranks}",
                        seen=f"{known[key]} and {tensor[key]}",
                    )
            known["pieces"].extend(tensor["pieces"])
    load = dict.fromkeys(ranks, 0)
    for tensor in joined.values():
        tensor["pieces"] = _one_of_each(tensor, load)
    merged = {"format": FORMAT, "transport": transports.pop(), "sources": sources, "tensors": list(joined.values())}
    check_manifest(merged)
    return merged


def _one_of_each(tensor: Manifest, load: dict[int, int]) -> list[Manifest]:
    """Choose one rank for each box that several ranks hold, the least loaded first."""
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Manifest]] = {}
    for piece in tensor["pieces"]:
        by_box.setdefault((tuple(piece["start"]), tuple(piece["shape"])), []).append(piece)
    chosen = []
    for (_, shape), pieces in by_box.items():
        pick = min(pieces, key=lambda p: (load[p["rank"]], p["rank"]))
        load[pick["rank"]] += math.prod(shape) * DTYPES[tensor["dtype"]].itemsize
        others = sorted((p for p in pieces if p is not pick), key=lambda p: int(p["rank"]))
        chosen.append({**pick, "replicas": others} if others else pick)
    return chosen


def _check_envelope(manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        seen = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ManifestError("not a manifest of this version", seen=str(seen), expected=f"format {FORMAT}")
    for key, kind in (("transport", str), ("sources", list), ("tensors", list)):
        if not isinstance(manifest.get(key), kind):
            raise ManifestError("malformed manifest", where=key, seen=type(manifest.get(key)).__name__)
    for source in manifest["sources"]:
        if not isinstance(source, dict) or not isinstance(source.get("buffers"), dict):
            raise ManifestError("malformed manifest", where="sources", seen=str(source)[:80])
        _natural(source.get("rank"), "sources: rank")
        control = source.get("control")
        if not isinstance(control, dict) or not isinstance(control.get("segment"), str):
            raise ManifestError("malformed manifest", where="sources: control", seen=repr(control)[:80])
        _natural(control.get("pieces"), "sources: control: pieces")


def _natural(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ManifestError("malformed manifest", where=where, seen=repr(value)[:80], expected="an integer >= 0")
    return value


def _naturals(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ManifestError("malformed manifest", where=where, seen=repr(value)[:80], expected="a list of integers")
    return tuple(_natural(item, where) for item in value)


def check_manifest(manifest: Any) -> tuple[CheckpointTensor, ...]:
    """Validate a merged manifest and read its tensors.

    Args:
        manifest: Anything a peer sent.

    Returns:
        The tensors, every one tiled exactly by its pieces.

    Raises:
        ManifestError: Naming the first thing that is wrong.
        EmptyUpdateError: If there is no tensor.
    """
    _check_envelope(manifest)
    sizes = {
        (source["rank"], name): (_natural(record.get("numel"), f"buffer {name}"), record.get("dtype"))
        for source in manifest["sources"]
        for name, record in source["buffers"].items()
        if isinstance(record, dict)
    }
    tensors = tuple(_read_tensor(record, sizes) for record in manifest["tensors"])
    if not tensors:
        raise EmptyUpdateError("the manifest names no tensor", fix="describe at least one tensor in the source")
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        raise ManifestError("a tensor is listed twice", seen=next(n for n in names if names.count(n) > 1))
    return tensors


def _read_tensor(record: Any, sizes: dict[tuple[int, str], tuple[int, Any]]) -> CheckpointTensor:
    if not isinstance(record, dict) or not isinstance(record.get("name"), str) or not record["name"]:
        raise ManifestError("malformed manifest", where="tensors", seen=repr(record)[:80])
    name = record["name"]
    where = f"tensor {name}"
    if record.get("dtype") not in DTYPES:
        raise ManifestError("unsupported dtype", where=where, seen=repr(record.get("dtype")))
    shape = _naturals(record.get("shape"), where)
    if not isinstance(record.get("pieces"), list):
        raise ManifestError("malformed manifest", where=where, seen="no list of pieces")
    pieces = tuple(_read_piece(piece, record["dtype"], where, sizes) for piece in record["pieces"])
    tensor = CheckpointTensor(name, shape, DTYPES[record["dtype"]], pieces)
    _check_tiling(tensor)
    return tensor


def _read_piece(piece: Any, dtype: str, where: str, sizes: dict[tuple[int, str], tuple[int, Any]]) -> Piece:
    if not isinstance(piece, dict):
        raise ManifestError("malformed manifest", where=where, seen=repr(piece)[:80])
    start, shape = _naturals(piece.get("start"), where), _naturals(piece.get("shape"), where)
    rank, offset = _natural(piece.get("rank"), where), _natural(piece.get("offset"), where)
    strides = _naturals(piece.get("strides"), where)
    index = _natural(piece.get("index"), where)
    if not len(start) == len(shape) == len(strides):
        raise ManifestError("malformed manifest", where=where, seen="start, shape and strides differ in length")
    region = Region(rank, str(piece.get("buffer")), offset, shape, strides)
    _check_region(region, dtype, where, sizes)
    replicas = piece.get("replicas", [])
    if not isinstance(replicas, list):
        raise ManifestError("malformed manifest", where=where, seen="replicas are no list")
    others = [_read_piece(other, dtype, where, sizes) for other in replicas]
    if any(other.box != Box(start, shape) or other.replicas for other in others):
        raise ManifestError("malformed manifest", where=where, seen="a replica of another box, or of a replica")
    return Piece(Box(start, shape), region, index, tuple(other.region for other in others))


def _check_region(region: Region, dtype: str, where: str, sizes: dict[tuple[int, str], tuple[int, Any]]) -> None:
    size, buffer_dtype = sizes.get((region.rank, region.buffer), (-1, None))
    if size < 0:
        raise ManifestError(
            "a piece names an unknown buffer",
            where=where,
            seen=f"rank {region.rank}, {region.buffer!r}",
            expected=str(sorted(sizes)[:8]),
        )
    if buffer_dtype != dtype or region.end > size:
        raise ManifestError(
            "a piece does not fit its buffer",
            where=f"{where}, rank {region.rank}, buffer {region.buffer!r}",
            seen=f"{dtype}, up to element {region.end}",
            expected=f"{buffer_dtype}, {size} elements",
        )


def _check_tiling(tensor: CheckpointTensor) -> None:
    """Prove that the pieces cover the tensor exactly once: disjoint, and together as large."""
    boxes = [piece.box for piece in tensor.pieces]
    held = sum(box.volume for box in boxes)
    if (pair := first_overlap(boxes)) is not None:
        box, other = boxes[pair[0]], boxes[pair[1]]
        raise ManifestError(
            "pieces of a tensor overlap",
            where=f"tensor {tensor.name}",
            seen=f"{box.start}+{box.shape} and {other.start}+{other.shape}",
            fix="ranks that hold the same elements must hold equal boxes",
        )
    if held != tensor.numel:
        raise ManifestError(
            "a tensor has a hole",
            where=f"tensor {tensor.name}",
            seen=f"{held} elements in {len(boxes)} pieces",
            expected=f"{tensor.numel} elements",
            fix="merge the manifests of all trainer ranks",
        )
