"""``vime-megatron``: look ahead (``plan``) and convert between Hugging Face folders and checkpoints (``convert``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
    expert: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    tokens: Annotated[int, typer.Option(help="Token budget of a micro-batch.")] = 8192,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
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
    tensor: Annotated[int, typer.Option(help="Tensor-parallel size, for a new checkpoint.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, for a new checkpoint.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Make a step-0 checkpoint of a Hugging Face folder, or a Hugging Face folder of a checkpoint.

    A checkpoint of several ranks is read, and made, under torchrun with as many processes.
    """
    with _readable_errors():
        manifest = _manifest(source)
        if manifest is None:
            settings: dict[str, Any] = {"tensor_parallel": tensor, "dtype": dtype}
            _run(TrainerConfig(model=source, device=cast("Any", device), **settings), None, target)
            return
        if model is None:
            raise CheckpointError(
                "which model is it?", where=str(source), seen="a checkpoint", fix="add --model HF_FOLDER"
            )
        sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "dtype")
        optimizer = OptimizerSettings(distributed=manifest["distributed_optimizer"])
        settings = {name: manifest[name] for name in sizes}
        _run(TrainerConfig(model=model, device=cast("Any", device), optimizer=optimizer, **settings), source, target)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest; ``None`` for a Hugging Face folder."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError("the manifest is not JSON", where=str(path), seen=str(error)) from error
    return found


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
        if checkpoint is None:
            trainer.save(target)
        else:
            trainer.load(checkpoint)
            trainer.export_hf(target)
    finally:
        trainer.close()
    if rank == 0:
        typer.echo(f"{target}: {'checkpoint at step 0' if checkpoint is None else 'Hugging Face folder'}")
