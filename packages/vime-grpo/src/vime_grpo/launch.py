"""Finding the pipelines and commands that other packages bring.

vime-grpo knows no pipeline. A package that has one registers it under the entry point group ``vime_grpo.pipelines``,
by the name that ``pipeline.mode`` selects::

    [project.entry-points."vime_grpo.pipelines"]
    colocated = "vime_integration.entry:run"

The entry is called as ``run(config, resume=folder_or_none)`` and returns the exit code of the process.

Commands that look at a machine need to know its devices and engines, so they are not here either. They are registered
under the group ``vime_grpo.commands``, by the names ``doctor`` (:class:`DoctorEntry`) and ``accept``
(:class:`AcceptEntry`)::

    [project.entry-points."vime_grpo.commands"]
    doctor = "vime_integration.doctor:run_doctor"
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from vime_grpo.config import RunConfig
from vime_grpo.errors import LaunchError

GROUP = "vime_grpo.pipelines"
COMMANDS = "vime_grpo.commands"


class PipelineEntry(Protocol):
    """What a pipeline package registers."""

    def __call__(self, config: RunConfig, *, resume: Path | None) -> int:
        """Run to the end.

        Args:
            config: The resolved configuration.
            resume: Run folder to continue, or None for a fresh run.

        Returns:
            The exit code: 0 when the run finished.
        """


class DoctorEntry(Protocol):
    """What is registered as the command ``doctor``."""

    def __call__(self, config: RunConfig | None, /, *, as_json: bool = False, out: Path | None = None) -> int:
        """Check this host, and a configuration if there is one, and print what was found.

        Args:
            config: The resolved configuration of a run, or None.
            as_json: Print one JSON object instead of lines.
            out: File to write that object into as well.

        Returns:
            The exit code: 0 when nothing stands in the way of a run.
        """


class AcceptEntry(Protocol):
    """What is registered as the command ``accept``."""

    def __call__(self, platform: str, gpus: int, out: Path, /) -> int:
        """Run the acceptance checks of a platform and write down what was measured.

        Args:
            platform: ``rocm``, ``cuda`` or ``cpu``.
            gpus: GPUs to use; 0 for all that are visible.
            out: Folder for the report.

        Returns:
            The exit code: 0 when every check passed.
        """


def find_pipeline(mode: str) -> PipelineEntry:
    """Return the entry of a pipeline.

    Args:
        mode: ``pipeline.mode`` of the configuration.

    Raises:
        LaunchError: No installed package has it, or it cannot be imported.
    """
    return cast("PipelineEntry", _find(GROUP, mode, "pipeline", "pipeline.mode"))


def find_doctor() -> DoctorEntry:
    """Return the command that checks this host.

    Raises:
        LaunchError: No installed package has it, or it cannot be imported.
    """
    return cast("DoctorEntry", _find(COMMANDS, "doctor", "command", "vime-grpo doctor"))


def find_accept() -> AcceptEntry:
    """Return the command that runs the acceptance checks of a platform.

    Raises:
        LaunchError: No installed package has it, or it cannot be imported.
    """
    return cast("AcceptEntry", _find(COMMANDS, "accept", "command", "vime-grpo accept"))


def _find(group: str, name: str, kind: str, where: str) -> Any:
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        raise LaunchError(
            f"no installed package has a {kind} named {name!r}",
            where=where,
            seen=f"installed {kind}s: {', '.join(sorted(found)) or 'none'}",
            fix="pip install vime-integration" if not found else "install the package that has it, or correct the name",
        )
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the {kind} {name!r} cannot be imported",
            where=found[name].value,
            seen=f"{type(error).__name__}: {error}",
            fix="reinstall the package that has it, with its dependencies",
        ) from error
