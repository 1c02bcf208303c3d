"""Writing the weights of all ranks as one Hugging Face folder.

Rank 0 assembles one checkpoint tensor at a time from the boxes of the ranks that hold them and writes files of bounded
size; it never holds more than one file's tensors. Everything else in the folder (configuration, tokenizer, chat
template) is copied from where the model came from. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from vime_megatron.families.mapping import Placement
from vime_megatron.weights.reader import INDEX, SINGLE

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".lock"}


def write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], *, max_file_bytes: int) -> None:
    """Write tensors as safetensors files with an index, or as the one file when there is one.

    Args:
        folder: Existing folder.
        tensors: Names and contiguous CPU tensors, consumed one at a time.
        max_file_bytes: A file is closed before it would pass this size.
    """
    files: list[list[str]] = []
    total, size, held = 0, 0, dict[str, Tensor]()

    def flush() -> None:
        nonlocal held, size
        path = folder / f"part-{len(files)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it is written 0600, and another user's engine will read it
        files.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_file_bytes:
            flush()
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_companions(source: Path, folder: Path, dtype: str) -> None:
    """Copy a model folder's files other than its weights.

    Args:
        source: Where the model came from.
        folder: Where its weights were written.
        dtype: Their type. A ``config.json`` that names another is copied with this one: engines and transformers load
            weights in the type that it names, and would round those of float16 to bfloat16.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    named = [key for key in ("dtype", "torch_dtype") if config.get(key) not in (None, dtype)]
    if named:
        path.write_text(json.dumps(config | dict.fromkeys(named, dtype), indent=2, ensure_ascii=False) + "\n")


def gather_tensors(
    params: Mapping[str, Tensor], all_placed: Sequence[Sequence[Placement]], *, rank: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole checkpoint tensors on rank 0, in name order; other ranks send their boxes and yield nothing.

    Every rank must run the iterator to its end.

    Args:
        params: This rank's parameters by name.
        all_placed: The placements of each rank; the first rank that lists a box sends it.
        rank: This rank.
        device: Where boxes are received.

    Yields:
        Name and contiguous CPU tensor.
    """
    boxes: dict[str, dict[object, tuple[int, Placement]]] = {}
    for owner, placed in enumerate(all_placed):
        for place in placed:
            boxes.setdefault(place.name, {}).setdefault(place.box, (owner, place))
    for name in sorted(boxes):
        whole: Tensor | None = None
        for owner, place in boxes[name].values():
            part = _fetch(params, place, owner=owner, rank=rank, device=device)
            if rank == 0 and part is not None:
                if whole is None:
                    whole = torch.empty(place.shape, dtype=part.dtype)
                whole[tuple(slice(start, stop) for start, stop in place.box)] = part
        if whole is not None:
            yield name, whole


def _fetch(
    params: Mapping[str, Tensor], place: Placement, *, owner: int, rank: int, device: torch.device
) -> Tensor | None:
    """Bring one box to rank 0."""
    if rank == owner:
        part = params[place.param][tuple(slice(start, stop) for start, stop in place.local)].detach()
        if rank == 0:
            return part
        dist.send(part.contiguous(), dst=0)
    elif rank == 0:
        dtype = next(iter(params.values())).dtype
        part = torch.empty([stop - start for start, stop in place.local], dtype=dtype, device=device)
        dist.recv(part, src=owner)
        return part
    return None
