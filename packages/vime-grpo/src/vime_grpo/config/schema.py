"""The configuration's own shape: which keys exist, what a key could have meant, and what type it has."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vime_grpo.config.base import PathMarker
from vime_grpo.errors import ConfigError


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, or None when it holds a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def fields(root: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) of every setting, in order."""
    for section_name, section_field in root.model_fields.items():
        section = section_type(section_field)
        if section is not None:
            for key, field in section.model_fields.items():
                yield section_name, key, field


def nearest(root: type[BaseModel], dotted: str) -> str:
    """Return the known key that a wrong one most likely meant, or an empty string.

    Looks at the keys of the same section first, then for the same key, or nearly so, in another one.
    """
    if "." not in dotted:
        match = difflib.get_close_matches(dotted, root.model_fields, n=1)
        return match[0] if match else ""
    section, _, last = dotted.partition(".")
    known = [(name, key) for name, key, _ in fields(root)]
    by_key = {key: name for name, key in reversed(known)}
    inside = [key for name, key in known if name == section]
    for keys, cutoff in ((inside, 0.6), (list(by_key), 0.8)):
        if match := difflib.get_close_matches(last, keys, n=1, cutoff=cutoff):
            return f"{section if keys is inside else by_key[match[0]]}.{match[0]}"
    return "" if inside else nearest(root, section)


def check_keys(root: type[BaseModel], raw: Mapping[str, Any], source: str) -> None:
    """Refuse keys that do not exist.

    Args:
        root: The configuration's class.
        raw: Sections with their keys, as read from TOML.
        source: The file, for the error.

    Raises:
        ConfigError: Names the source, the section, the key and the nearest key that exists.
    """
    for name, content in raw.items():
        field = root.model_fields.get(name)
        section = section_type(field) if field is not None else None
        if section is None:
            _unknown(root, name, f"{source}, section [{name}]" if isinstance(content, Mapping) else source)
        elif not isinstance(content, Mapping):
            raise ConfigError(f"{name} is a section", where=source, seen=repr(content), expected=f"[{name}] with keys")
        else:
            for key in content:
                if key not in section.model_fields:
                    _unknown(root, f"{name}.{key}", f"{source}, section [{name}]")


def _unknown(root: type[BaseModel], dotted: str, where: str) -> typing.NoReturn:
    guess = nearest(root, dotted)
    kind = "setting" if "." in dotted else "section"
    section = dotted.partition(".")[0]
    siblings = [key for name, key, _ in fields(root) if name == section] or list(root.model_fields)
    fix = f"did you mean {guess!r}?" if guess else "`vime-grpo config-reference` explains them all"
    raise ConfigError(
        f"unknown {kind} {dotted!r}", where=where, expected="" if guess else f"one of {', '.join(siblings)}", fix=fix
    )


def find_field(root: type[BaseModel], dotted: str, where: str) -> tuple[str, str, tuple[str, ...], FieldInfo]:
    """Find the setting that a dotted name means.

    Args:
        root: The configuration's class.
        dotted: ``section.key``, or ``section.key.inner`` where the setting is a table of free keys.
        where: Where the name was written, for the error.

    Returns:
        Section, key, the inner keys (usually none) and the field.

    Raises:
        ConfigError: There is no such setting.
    """
    section_name, _, rest = dotted.partition(".")
    key, *inner = rest.split(".")
    section_field = root.model_fields.get(section_name)
    section = section_type(section_field) if section_field is not None else None
    field = section.model_fields.get(key) if section is not None else None
    if field is None or (inner and get_origin(field.annotation) is not dict) or not all(inner):
        _unknown(root, dotted, where)
    return section_name, key, tuple(inner), field


def holds_path(field: FieldInfo) -> bool:
    """Return whether a setting is a path in the file system."""
    if any(isinstance(item, PathMarker) for item in field.metadata):
        return True
    return any(Path in get_args(option) or option is Path for option in _options(field.annotation))


def _options(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def type_text(annotation: Any) -> str:
    """Return a setting's type as a reader of TOML would call it."""
    options = [option for option in _options(annotation) if option is not type(None)]
    return " or ".join(_one_type_text(option) for option in options)


def _one_type_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return type_text(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if origin is tuple:
        return f"array of {type_text(get_args(annotation)[0])}s"
    if origin is dict:
        return "table"
    names = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "path"}
    return names[annotation]
