"""The probe's results as a table that a person reads."""

from __future__ import annotations

from vime_devices.probe.controller import Arm, Case, ProbeResult


def markdown(result: ProbeResult) -> str:
    """Write one row per mask and exported ordinal, one column per arm.

    Args:
        result: The run.

    Returns:
        A Markdown table, with a line above it that names the software and the devices.
    """
    by_place = {(case.mask, case.exported, case.arm): case for case in result.cases}
    names = ", ".join(f"{device['ordinal']}: {device['name']}" for device in result.devices)
    lines = [
        f"{result.platform}, {result.runtime}, torch {result.torch}; {names}",
        "",
        "| importer's mask | exported from | on the exporter's ordinal | on the importer's own index |",
        "|---|---|---|---|",
    ]
    for mask, exported in dict.fromkeys((case.mask, case.exported) for case in result.cases):
        cells = [_cell(by_place[mask, exported, arm]) for arm in (Arm.EXPORTED, Arm.OWN)]
        lines.append(f"| `{mask}` | {exported} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(case: Case) -> str:
    note = {"same": "", "other": " (the index is another GPU there)", "": ""}[case.denotes]
    text = f": {case.text}".replace("|", "/") if case.text else ""
    return f"{case.outcome.value}{note}{text}"
