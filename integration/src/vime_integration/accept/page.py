"""The page that goes with a release: the manifest, for people. Markdown, because that is what release notes take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = 240  # characters of one cell; the manifest has the rest


def write_page(manifest: Mapping[str, Any]) -> str:
    """Write the page.

    Args:
        manifest: What ``manifest.json`` holds.

    Returns:
        Markdown.
    """
    about, stages = manifest["about"], manifest["stages"]
    verdict = "passed" if manifest["passed"] else "FAILED"
    chips = ", ".join(sorted({f"{d['name']} ({d.get('arch', '')})" for d in about["devices"]})) or "no GPU"
    lines = [
        f"# Acceptance on {manifest['platform']}: {verdict}",
        "",
        f"{len(about['devices'])} devices: {chips}. {manifest['steps']} steps a run. "
        f"{manifest['started']} to {manifest['finished']} (UTC).",
        "",
        "| stage | outcome | seconds | |",
        "|---|---|---|---|",
    ]
    for stage in stages:
        text = stage["reason"] or stage["title"]
        lines.append(f"| {stage['name']} | {stage['outcome']} | {stage['seconds']:.1f} | {_cell(text)} |")
    lines += ["", "## What was compared", "", "| stage | what | seen | expected | |", "|---|---|---|---|---|"]
    for stage in stages:
        for t in stage["thresholds"]:
            held = "ok" if t["holds"] else "FAIL"
            lines.append(
                f"| {stage['name']} | {_cell(t['name'])} | {_cell(t['seen'])} | {_cell(t['expected'])} | {held} |"
            )
    lines += ["", "## Figures", ""]
    for stage in stages:
        lines += _figures(stage)
    lines += ["", "## What it ran on", "", "| | |", "|---|---|"]
    for group in ("host", "runtime", "packages", "commits"):
        lines += [f"| {group}: {name} | {_cell(str(value))} |" for name, value in about[group].items()]
    return "\n".join(lines) + "\n"


def _figures(stage: Mapping[str, Any]) -> list[str]:
    if not stage["figures"] and not stage["notes"]:
        return []
    lines = [f"### {stage['name']}", ""]
    lines += [f"Note: {note}." for note in stage["notes"]]
    for name, value in stage["figures"].items():
        if (
            isinstance(value, list)
            and value
            and all(isinstance(line, str) and line.startswith("|") for line in value[2:])
        ):
            lines += ["", *value, ""]  # a table of the probe's own
        elif isinstance(value, Mapping):
            inner = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
            lines.append(f"- {name}: {inner}")
        else:
            lines.append(f"- {name}: {_short(value)}")
    return [*lines, ""]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 3] + "..."
