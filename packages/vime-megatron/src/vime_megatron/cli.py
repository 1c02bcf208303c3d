"""``vime-megatron``: look ahead (``plan``) and convert between Hugging Face folders and checkpoints (``convert``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from vime_megatron.config import Dtype, OptimizerSettings, Recompute, TrainerConfig
from vime_megatron.errors import CheckpointError, TrainerError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Show this package's errors as text, without a traceback."""
    try:
        yield
    except TrainerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Hugging Face folder; only its config.json is read.")],
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU, in GiB (H200: 140, MI300X: 192).")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    tensor: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    context: Annotated[int, typer.Option(help="Context-parallel size.")] = 1,
    expert: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    tokens: Annotated[int, typer.Option(help="Token budget of a micro-batch.")] = 8192,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    distributed: Annotated[bool, typer.Option(help="Shard the optimiser over data-parallel ranks.")] = False,
) -> None:
    """Say what a trainer will hold on each GPU, and whether it fits; exit status 2 when it does not."""
    from vime_megatron.memory import plan_memory

    with _readable_errors():
        config = TrainerConfig(
            model=model,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            context_parallel=context,
            expert_parallel=expert,
            max_tokens_per_microbatch=tokens,
            dtype=cast("Dtype", dtype),
            recompute=cast("Recompute", recompute),
            optimizer=OptimizerSettings(distributed=distributed),
        )
        found = plan_memory(config, world_size=gpus)
    typer.echo(f"{found.parameters:,} parameters; on the fullest of {gpus} GPU(s):")
    for name in ("weights", "gradients", "optimizer", "activations", "vocabulary", "reserve"):
        typer.echo(f"  {name:<12} {getattr(found, name) / 2**30:8.2f} GiB")
    fits = found.total <= gpu_gib * 2**30
    typer.echo(f"  {'total':<12} {found.total / 2**30:8.2f} GiB of {gpu_gib:g}: {'fits' if fits else 'does NOT fit'}")
    if not fits:
        raise typer.Exit(2)


@app.command()
def convert(
    source: Annotated[Path, typer.Option("--from", help="Hugging Face folder, or a checkpoint.")],
    target: Annotated[Path, typer.Option("--to", help="Folder that appears when it is complete.")],
    model: Annotated[Path | None, typer.Option(help="The checkpoint's Hugging Face folder.")] = None,
    tensor: Annotated[int, typer.Option(help="Tensor-parallel size, under torchrun.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Pipeline-parallel size, under torchrun.")] = 1,
    expert: Annotated[int, typer.Option(help="Expert-parallel size, under torchrun.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, for a new checkpoint.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Make a step-0 checkpoint of a Hugging Face folder, or a Hugging Face folder of a checkpoint.

    Any layout reads any other's checkpoint, so one process is enough for a model that fits in it; a larger one is
    shared by the processes of torchrun.
    """
    with _readable_errors():
        sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "expert_parallel": expert}
        settings: dict[str, Any] = sizes | {"device": device}
        if not (source / "manifest.json").is_file():
            _run(TrainerConfig(model=source, dtype=cast("Dtype", dtype), **settings), None, target)
            return
        from vime_megatron.checkpoint.folders import find

        _, manifest = find(source)
        if model is None:
            raise CheckpointError(
                "which model is it?", where=str(source), seen="a checkpoint", fix="add --model HF_FOLDER"
            )
        _run(TrainerConfig(model=model, dtype=manifest["dtype"], **settings), source, target)


def _run(config: TrainerConfig, checkpoint: Path | None, target: Path) -> None:
    from vime_megatron.trainer import MegatronTrainer

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = MegatronTrainer(
        config,
        rank=rank,
        world_size=world,
        init_method="env://" if world > 1 else None,
        device_index=int(os.environ.get("LOCAL_RANK", "0")),
    )
    try:
        with _progress(shown=rank == 0) as stage:
            if checkpoint is None:
                trainer.save(target, progress=stage("writing the checkpoint"))
            else:
                trainer.load(checkpoint, progress=stage("reading the checkpoint"))
                trainer.export_hf(target, progress=stage("writing the folder"))
    finally:
        trainer.close()
    if rank == 0:
        typer.echo(f"{target}: {'checkpoint at step 0' if checkpoint is None else 'Hugging Face folder'}")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show a bar for each stage, of the bytes of this rank's share.

    Args:
        shown: Only one rank of several shows it.

    Yields:
        Makes the callback of a stage from its name.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bars:

        def stage(text: str) -> Callable[[int, int], None]:
            task = bars.add_task(text, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage
