"""Reading a Hugging Face folder's safetensors into this rank's parameters, slice by slice.

Only the boxes that the rank holds are read, so loading a large model at tensor parallelism 8 reads an eighth of it per
rank. The set of names must match the family's exactly; what does not is listed in the error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vime_megatron.errors import ModelError
from vime_megatron.families.mapping import Box, Placement

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_EMBEDDING, _PROJECTION = "model.embed_tokens.weight", "lm_head.weight"
_LISTED = 8


class FolderReader:
    """The tensors of one folder by name; a context manager.

    Args:
        folder: Hugging Face folder.

    Raises:
        ModelError: There are no safetensors, or a file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        """Open every file's header."""
        self.folder = folder
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError("cannot read weights", where=str(path), seen=str(error)) from error
            self._files.append(handle)
            self._file_of.update((name, handle) for name in handle.keys())  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._file_of.clear()

    @property
    def names(self) -> set[str]:
        """Names of all tensors in the folder."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        """Read one box of a tensor."""
        part: Tensor = self._file_of[name].get_slice(name)[tuple(slice(start, stop) for start, stop in box)]
        return part


def load_folder(folder: Path, params: Mapping[str, Tensor], placed: Sequence[Placement], names: set[str]) -> None:
    """Fill this rank's parameters.

    Args:
        folder: Hugging Face folder.
        params: Local parameters by name; written in place, cast to their own type.
        placed: Where each checkpoint box goes.
        names: Every name that the whole model's checkpoint must hold.

    Raises:
        ModelError: Names or shapes differ from the model's; the text lists them. Or the model is tied, and the folder
            holds an output projection that is not its embedding. Or the parameters are float16, and a weight is too
            large for that.
    """
    with FolderReader(folder) as reader, torch.no_grad():
        check_names(reader.names, names, str(folder))
        if _PROJECTION in reader.names - names:
            _check_copy(reader, [place for place in placed if place.name == _EMBEDDING], str(folder))
        for place in placed:
            if reader.shape(place.name) != place.shape:
                raise ModelError(
                    "a tensor of the checkpoint has another shape than config.json says",
                    where=f"{place.name} in {folder}",
                    seen=str(reader.shape(place.name)),
                    expected=str(place.shape),
                )
            target = params[place.param][tuple(slice(start, stop) for start, stop in place.local)]
            part = reader.read(place.name, place.box)
            _check_range(part, target.dtype, f"{place.name} in {folder}")
            target.copy_(part)


def _check_range(part: Tensor, dtype: torch.dtype, where: str) -> None:
    """Refuse what float16 cannot hold; the wider types hold all that a checkpoint may be written in."""
    if dtype is not torch.float16 or not part.numel():
        return
    largest, limit = float(part.abs().amax()), torch.finfo(dtype).max
    if largest > limit:
        raise ModelError(
            "a weight is too large for float16",
            where=where,
            seen=f"{largest:g}",
            expected=f"at most {limit:g}",
            fix="train this model in bfloat16",
        )


def _check_copy(reader: FolderReader, places: Sequence[Placement], where: str) -> None:
    """Refuse an output projection of its own where config.json says that there is none.

    vLLM would pass over it without a word, and transformers would use it; either way the model is not the one that was
    trained.
    """
    same = reader.shape(_PROJECTION) == reader.shape(_EMBEDDING) and all(
        torch.equal(reader.read(_PROJECTION, place.box), reader.read(_EMBEDDING, place.box)) for place in places
    )
    if not same:
        raise ModelError(
            "the output projection is not the embedding",
            where=f"{_PROJECTION} in {where}",
            seen="other values than in " + _EMBEDDING,
            expected="the same, since tie_word_embeddings is true in config.json",
            fix="set it to false there, or remove the tensor, whichever the model was trained with",
        )


def check_names(found: set[str], wanted: set[str], where: str) -> None:
    """Compare tensor names.

    Args:
        found: Names in the checkpoint.
        wanted: Names that the model needs.
        where: The folder, for the text.

    Raises:
        ModelError: Names are missing or unexpected. A stored copy of a tied output projection and stored rotary
            frequencies (old exports hold them) are let pass.
    """
    missing = wanted - found
    extra = {name for name in found - wanted if name != _PROJECTION and not name.endswith("rotary_emb.inv_freq")}
    if missing or extra:
        listed = [f"missing {_some(missing)}"] if missing else []
        listed += [f"unexpected {_some(extra)}"] if extra else []
        raise ModelError(
            "the checkpoint does not fit the model",
            where=where,
            seen="; ".join(listed),
            expected=f"{len(wanted)} tensors, named as the architecture names them",
        )


def _some(names: set[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                "the index of the weights cannot be read",
                where=str(index),
                seen=f"{type(error).__name__}: {error}",
                expected="a JSON object whose weight_map names each tensor's file",
            ) from error
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ModelError("weight files are missing", where=str(index), seen=", ".join(missing) + " not found")
        if SINGLE not in files and (folder / SINGLE).is_file():
            raise ModelError(
                "the folder holds two sets of weights",
                where=str(folder),
                seen=f"{SINGLE}, which transformers reads, and {len(files)} files named by {INDEX}, which vLLM reads",
                expected="one of the two",
                fix=f"remove the set that is out of date; of the second, {INDEX} too",
            )
        return [folder / name for name in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ModelError(
        "no weights in the model folder",
        where=str(folder),
        expected=f"{SINGLE} or {INDEX}",
        fix="download the safetensors files, or set random_weights to start from scratch",
    )
