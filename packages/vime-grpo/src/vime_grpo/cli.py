"""The command ``vime-grpo``.

Exit codes:

==== ===============================================================================
0    the run finished (or the configuration is right, with ``--dry-run``)
1    an unexpected error, with a traceback: a bug
2    a wrong command line, configuration or run folder
3    the pipeline, command or extra is not installed or cannot be imported
4    the run failed for a reason that the message explains
130  interrupted
==== ===============================================================================

A pipeline may return other codes; they are passed on. Nothing here imports torch, so ``--dry-run`` answers at once,
also on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vime_grpo.config import RunConfig, config_reference, dump_toml, load_config
from vime_grpo.errors import ConfigError, LaunchError, ReportError
from vime_grpo.launch import find_accept, find_doctor, find_pipeline

EXIT_CONFIG, EXIT_LAUNCH, EXIT_RUN, EXIT_INTERRUPTED = 2, 3, 4, 130

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="RL post-training of language models with GRPO.")


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")] = None,
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Continue a run folder; its own configuration is used if none is given."),
    ] = None,
) -> None:
    """Train a model as a configuration says."""
    with _reported():
        resolved = _resolve(config, set_ or [], resume)
        if dry_run:
            typer.echo(dump_toml(resolved), nl=False)
            return
        code = find_pipeline(resolved.pipeline.mode)(resolved, resume=resume.absolute() if resume else None)
        raise typer.Exit(code)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Also check what this run would need.")
    ] = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write that object into a file.")] = None,
) -> None:
    """Check this host, its devices and packages, and a configuration, before anything expensive starts."""
    with _reported():
        if config is None and set_:
            raise ConfigError("overrides without a configuration", expected="vime-grpo doctor CONFIG.toml --set ...")
        resolved = load_config(config, set_ or []) if config is not None else None
        raise typer.Exit(find_doctor()(resolved, as_json=as_json, out=out.absolute() if out else None))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default report.html in the folder.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN_DIR", help="A run to draw beside it; repeatable.")
    ] = None,
) -> None:
    """Write a run's report: one HTML page with its curves and samples, that needs no network."""
    with _reported():
        from vime_grpo.report import write_report

        typer.echo(write_report(run, out, compare=compare or []))


class Platform(StrEnum):
    """What `accept` can run on."""

    ROCM = "rocm"
    CUDA = "cuda"
    CPU = "cpu"


@app.command()
def accept(
    platform: Annotated[Platform, typer.Option(help="What the machine is.")],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to use; 0 for all that are visible.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report.")] = Path("acceptance"),
) -> None:
    """Run the acceptance checks of a platform and write down what was measured."""
    with _reported():
        raise typer.Exit(find_accept()(platform.value, gpus, out.absolute()))


@app.command("config-reference")
def reference() -> None:
    """Print what every setting means, as Markdown."""
    typer.echo(config_reference(), nl=False)


@app.command()
def papers() -> None:
    """Print which paper each choice of the objective comes from, as Markdown."""
    from vime_grpo.papers import paper_index  # needs torch

    typer.echo(paper_index(), nl=False)


def _resolve(config: Path | None, overrides: list[str], resume: Path | None) -> RunConfig:
    if resume is not None:
        saved = resume / "config.toml"
        if not saved.is_file():
            raise ConfigError(
                "not a run folder",
                where=f"--resume {resume}",
                seen="no config.toml" if resume.is_dir() else "no such folder",
                expected="a folder that `vime-grpo train` made",
            )
        config = config or saved
        # The folder may have been moved or renamed since: where it is now counts.
        overrides = [*overrides, f"pipeline.run_dir={resume.absolute()}"]
    if config is None:
        raise ConfigError("no configuration", expected="vime-grpo train CONFIG.toml, or --resume RUN_DIR")
    return load_config(config, overrides)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn errors that explain themselves into a panel and an exit code; let others through with their traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except EOFError as error:  # typer takes it for Ctrl-D: it says "Aborted." and nothing of the cause
        raise RuntimeError(f"something ended too early: {error!r}") from error
    except Exception as error:
        if not hasattr(error, "what"):
            raise
        _print_panel(error)
        codes = {ConfigError: EXIT_CONFIG, ReportError: EXIT_CONFIG, LaunchError: EXIT_LAUNCH}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_RUN)
        raise typer.Exit(code) from error


def _print_panel(error: Exception) -> None:
    """Print an error of any vime package; they all have the same fields, whatever their base class."""
    from rich.console import Console  # not on the way of a dry run
    from rich.panel import Panel
    from rich.text import Text

    lines = Text()
    for label in ("where", "seen", "expected", "fix"):
        if value := getattr(error, label, ""):
            lines.append(f"{label:<9}", style="bold").append(f"{value}\n")
    title = Text(str(getattr(error, "what", error)), style="bold red")
    body = Text("\n").join([title, lines]) if lines else title
    body.rstrip()
    Console(stderr=True).print(Panel(body, title=type(error).__name__, title_align="left", border_style="red"))


def main() -> None:
    """Run the command line."""
    app()
