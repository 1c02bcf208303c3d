"""TOML in and out, and overrides of the form ``section.key=value``.

TOML knows no null, so an optional setting that is not set is left out when written; every optional setting has None as
its default, hence what is read back is equal.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from vime_grpo.config.schema import find_field, holds_path
from vime_grpo.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: The file cannot be read or is not TOML; the text says where it broke.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("the configuration file does not exist", where=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not valid TOML", where=str(path), seen=str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the configuration file cannot be read", where=str(path), seen=str(error)) from error


def dump_toml(config: BaseModel) -> str:
    """Return a configuration as TOML that reads back equal."""
    return tomli_w.dumps(_plain(config.model_dump(mode="python", exclude_none=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_scalar(text: str) -> Any:
    """Parse the value of an override: as TOML, or else as a plain string, so that the shell needs no second quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_overrides(root: type[BaseModel], raw: dict[str, Any], overrides: Iterable[str], folder: Path) -> None:
    """Write overrides into what was read from a file.

    Args:
        root: The configuration's class.
        raw: Sections with their keys; changed in place.
        overrides: ``section.key=value`` each, later ones win; values are TOML or plain strings.
        folder: What relative paths in overrides start from: the working directory, as everywhere in a shell.

    Raises:
        ConfigError: An override has no ``=`` or names no setting.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        where = f"--set {override}"
        if not equals:
            raise ConfigError("an override has no value", where=where, expected="--set section.key=value")
        section, key, inner, field = find_field(root, name.strip(), where)
        value = parse_scalar(text.strip())
        if holds_path(field) and not isinstance(value, str):
            value = text.strip()
        if holds_path(field):
            value = str(folder / Path(value).expanduser())
        target = raw.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(
                f"{section} is a section", where=where, seen=repr(target), expected=f"[{section}] with keys"
            )
        for part in (key, *inner)[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{section}.{part} is no table", where=where, seen=repr(target))
        target[(key, *inner)[-1]] = value
