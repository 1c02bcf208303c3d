"""The reference page of the configuration, generated from the fields' own docs so that it cannot drift."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from vime_grpo.config.run import RunConfig
from vime_grpo.config.schema import section_type, type_text

_HEAD = """\
# Configuration reference

A run is described by one TOML file. Every setting can be overridden on the command line, `--set section.key=value`;
an unknown key is an error. Relative paths in the file start from the file's folder, relative paths on the command
line from the working directory. This page is generated: `vime-grpo config-reference > CONFIG.md`.
"""


def config_reference() -> str:
    """Return the reference page as Markdown."""
    parts = [_HEAD]
    for name, field in RunConfig.model_fields.items():
        section = section_type(field)
        if section is None:
            continue
        parts.append(f"\n## [{name}]\n\n{inspect.getdoc(section)}\n")
        parts.append("\n| key | type | default | meaning |\n|---|---|---|---|\n")
        for key, setting in section.model_fields.items():
            meaning = (setting.description or "").replace("|", "\\|")
            parts.append(f"| `{key}` | {_type(setting)} | {_default(setting)} | {meaning} |\n")
    return "".join(parts)


def _type(field: FieldInfo) -> str:
    bounds = []
    for item in field.metadata:
        if isinstance(item, annotated_types.Ge):
            bounds.append(f">= {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            bounds.append(f"> {item.gt}")
        elif isinstance(item, annotated_types.Le):
            bounds.append(f"<= {item.le}")
        elif isinstance(item, annotated_types.Lt):
            bounds.append(f"< {item.lt}")
    text = type_text(field.annotation)
    return f"{text}, {', '.join(bounds)}" if bounds else text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"
