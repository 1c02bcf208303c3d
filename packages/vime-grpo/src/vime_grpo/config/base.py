"""What every section of the configuration shares: strict types, no unknown keys, paths that know their folder.

Strict means that ``"64"`` is not a number and ``1`` is not a truth value: a value of the wrong type is a mistake to
report, not a wish to guess. Unknown keys are refused, because a misspelt key that is ignored costs a day of GPU time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

#: Key of the validation context that holds the folder which relative paths start from.
BASE_FOLDER = "base_folder"


class Section(BaseModel):
    """Base of the configuration's sections: immutable, strict, closed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class PathMarker:
    """Marks a field as a path in the file system, for the override parser and the reference page."""


def _to_path(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str | Path):
        return value  # pydantic reports the wrong type
    path = Path(value).expanduser()
    base = (info.context or {}).get(BASE_FOLDER)
    if base is not None and not path.is_absolute():
        path = Path(base) / path
    # `..` is folded without following links, so that the resolved file shows the path that the user meant.
    return Path(*_fold(path.parts)) if path.is_absolute() else path


def _fold(parts: tuple[str, ...]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if part == ".." and len(kept) > 1:
            kept.pop()
        elif part != "..":
            kept.append(part)
    return kept


FilePath = Annotated[Path, BeforeValidator(_to_path), PathMarker()]
"""A path; when relative, resolved against the folder of the TOML file it stands in."""

Count = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""

NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Words = Annotated[tuple[str, ...], Field(strict=False)]
"""An array of strings (TOML arrays arrive as lists, hence not strict)."""

Ids = Annotated[tuple[int, ...], Field(strict=False)]

DottedPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*[:.][A-Za-z_]\w*$")]
"""A Python object by its import path, ``package.module:name``."""

Switch = Literal["auto", "on", "off"]
"""``auto`` leaves the choice to what was measured or to the device; the run says what was chosen."""
