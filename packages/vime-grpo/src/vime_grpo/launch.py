"""Finding and starting the pipeline that a configuration names.

vime-grpo knows no pipeline. A package that has one registers it under the entry point group ``vime_grpo.pipelines``,
by the name that ``pipeline.mode`` selects::

    [project.entry-points."vime_grpo.pipelines"]
    colocated = "vime_integration.entry:run"

The entry is called as ``run(config, resume=folder_or_none)`` and returns the exit code of the process.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from vime_grpo.config import RunConfig
from vime_grpo.errors import LaunchError

GROUP = "vime_grpo.pipelines"


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


def find_pipeline(mode: str) -> PipelineEntry:
    """Return the entry of a pipeline.

    Args:
        mode: ``pipeline.mode`` of the configuration.

    Raises:
        LaunchError: No installed package has it, or it cannot be imported.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if mode not in found:
        raise LaunchError(
            f"no installed package has a pipeline named {mode!r}",
            where="pipeline.mode",
            seen=f"installed pipelines: {', '.join(sorted(found)) or 'none'}",
            fix="pip install vime-integration" if not found else "install the package that has it, or correct the name",
        )
    try:
        entry = found[mode].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the pipeline {mode!r} cannot be imported",
            where=found[mode].value,
            seen=f"{type(error).__name__}: {error}",
            fix="reinstall the package that has it, with its dependencies",
        ) from error
    return cast("PipelineEntry", entry)
