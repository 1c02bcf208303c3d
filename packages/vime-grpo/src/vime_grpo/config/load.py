"""From a TOML file and overrides to a checked :class:`RunConfig`, and back into a file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vime_grpo.config.base import BASE_FOLDER
from vime_grpo.config.model_folder import check_model_folder
from vime_grpo.config.run import RunConfig
from vime_grpo.config.schema import check_keys
from vime_grpo.config.toml import apply_overrides, dump_toml, read_toml
from vime_grpo.config.watching import EvaluationSection
from vime_grpo.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> RunConfig:
    """Read, override, resolve and check a configuration.

    Relative paths in the file start from the file's folder; relative paths in overrides from the working directory.

    Args:
        path: The TOML file.
        overrides: ``section.key=value`` each, as given to ``--set``.
        check_files: Also check the model folder and the data file that the configuration names.

    Returns:
        The resolved configuration.

    Raises:
        ConfigError: Anything is wrong; the error names the file, the section, the key and what was expected.
    """
    file = Path(path).expanduser().absolute()
    raw = read_toml(file)
    check_keys(RunConfig, raw, str(file))
    apply_overrides(RunConfig, raw, overrides, Path.cwd())
    source = f"{file} with --set" if overrides else str(file)
    config = config_from_dict(raw, base_folder=file.parent, source=source)
    if check_files:
        check_model_folder(config)
        _check_prompt_files(config, file)
    return config


def config_from_dict(raw: Mapping[str, Any], *, base_folder: Path | None = None, source: str = "a dict") -> RunConfig:
    """Check a configuration that is already in memory.

    Args:
        raw: Sections with their keys.
        base_folder: What relative paths start from; None leaves them as they are.
        source: Where the values come from, for errors.

    Returns:
        The resolved configuration.

    Raises:
        ConfigError: As for `load_config`.
    """
    check_keys(RunConfig, raw, source)
    try:
        return RunConfig.model_validate(raw, context={BASE_FOLDER: base_folder})
    except ValidationError as error:
        raise _config_error(error.errors(include_url=False), source) from error


def _check_prompt_files(config: RunConfig, file: Path) -> None:
    for name, section in (("data", config.data), ("evaluation", config.evaluation)):
        unused = isinstance(section, EvaluationSection) and not section.enabled
        if section.path is not None and not unused and not section.path.is_file():
            raise ConfigError("the data file does not exist", where=f"{file}, {name}.path", seen=str(section.path))


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration as TOML; `load_config` reads it back equal."""
    Path(path).write_text(dump_toml(config), encoding="utf-8")


def _config_error(errors: list[ErrorDetails], source: str) -> ConfigError:
    if len(errors) == 1:
        name, text, seen, hint = _describe(errors[0])
        where = f"{source}, {name}" if name else source
        return ConfigError("wrong setting", where=where, seen=seen, expected=text, fix=hint)
    lines = []
    for error in errors:
        name, text, seen, hint = _describe(error)
        lines.append(f"\n  {name}: {text}" + (f" (seen: {seen})" if seen else "") + (f" ({hint})" if hint else ""))
    return ConfigError(f"{len(errors)} wrong settings", where=source, seen="".join(lines))


def _describe(error: ErrorDetails) -> tuple[str, str, str, str]:
    """Return (dotted name, what is expected, what was seen, hint) of one of pydantic's errors."""
    name = ".".join(str(part) for part in error["loc"])
    text = re.sub(r"^(Value error, |Input should be )", "", error["msg"])
    if error["type"] == "missing":
        return name, "to be set: it has no default", "", ""
    if error["type"] == "value_error":
        return name, text, "", ""
    seen = repr(error["input"])
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        close = difflib.get_close_matches(str(error["input"]), choices, n=1)
        return name, text, seen, f"did you mean {close[0]!r}?" if close else ""
    return name, text, seen, ""
