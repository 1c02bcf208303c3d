"""Checks of a configuration against this host: model, data, reward, pipeline, placement, memory, disk.

`vime_grpo.load_config` has checked it against itself; what is left is what only this machine can tell. The checks that
a run makes anyway are called here, not written again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from vime_devices import Platform, detect_platform
from vime_grpo import RunConfig
from vime_grpo.launch import find_pipeline
from vime_megatron import ModelShape, check_model
from vime_megatron.memory import count_parameters
from vime_rollout import load_reward

from vime_integration.budget import budget, settle, trainer_plan
from vime_integration.device_memory import DeviceMemory, ask_memory
from vime_integration.disk import FIX, disk_need
from vime_integration.doctor.findings import Check, Status, guarded, size
from vime_integration.doctor.host import available_memory, shm_free
from vime_integration.foreign import look_at_foreign
from vime_integration.needs import WIDTHS, PhaseNeed, cpu_needs
from vime_integration.placement import place
from vime_integration.preflight import check_before_start, check_data, check_evaluation
from vime_integration.sharing import choose

TIGHT = 0.95  # of a budget: the estimate of activations is not exact
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the configuration is held against; by default this host.

    Attributes:
        platform: What it offers.
        devices: Its visible GPUs.
        host_bytes: Available host memory.
        shm_bytes: Free shared memory.
        environ: The environment that masks are read from; None for this process's.
    """

    platform: Platform
    devices: tuple[DeviceMemory, ...]
    host_bytes: int
    shm_bytes: int
    environ: Mapping[str, str] | None = None


def this_machine() -> Machine:
    """Look at this host."""
    platform, root = detect_platform(), Path("/")
    devices = () if platform is Platform.CPU else tuple(ask_memory())
    return Machine(platform, devices, available_memory(root), shm_free(root))


def check_configuration(config: RunConfig, machine: Machine | None = None) -> Iterator[Check]:
    """Check a configuration.

    Args:
        config: The resolved configuration.
        machine: What to hold it against; by default this host.
    """
    for name, group in (("model", _model), ("data", _data), ("reward", _reward), ("pipeline", _pipeline)):
        yield from guarded(f"config.{name}", partial(group, config))
    yield from guarded("config.run_dir", partial(_run_dir, config))
    yield from guarded("config.preflight", partial(_preflight, config))
    yield from guarded("config.engines", partial(_foreign, config))
    on = machine if machine is not None else this_machine()
    yield from guarded("config.placement", partial(_placement, config, on))
    yield from guarded("config.memory", partial(_memory, config, on))


def _model(config: RunConfig) -> Iterator[Check]:
    folder = config.model.path
    shape = check_model(folder)
    weights = sorted(folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in weights)
    kind = f"{shape.architecture}, {shape.layers} layers, {shape.experts or 'no'} experts"
    yield Check(
        "config.model",
        Status.OK if weights else Status.FAIL,
        f"{kind}; {size(stored)} in {len(weights)} safetensors files",
        "a Hugging Face folder with safetensors",
        "download the weights, or convert them to safetensors",
    )
    has = any((folder / name).is_file() for name in TOKENIZER_FILES)
    yield Check(
        "config.tokenizer",
        Status.OK if has else Status.FAIL,
        "there" if has else f"none of {', '.join(TOKENIZER_FILES)} in {folder}",
        "the model's tokenizer",
        "copy the tokenizer's files into the model's folder",
    )


def _data(config: RunConfig) -> Iterator[Check]:
    yield Check("config.data", Status.OK, check_data(config))
    if held_out := check_evaluation(config):
        yield Check("config.evaluation", Status.OK, held_out)


def _reward(config: RunConfig) -> Iterator[Check]:
    name = config.reward.name or config.reward.path or ""
    load_reward(name, timeout_s=config.reward.timeout_s, options=config.reward.options).close()
    yield Check("config.reward", Status.OK, name)


def _pipeline(config: RunConfig) -> Iterator[Check]:
    find_pipeline(config.pipeline.mode)
    yield Check("config.pipeline", Status.OK, f"{config.pipeline.mode}, {config.pipeline.steps} steps")


def _run_dir(config: RunConfig) -> Iterator[Check]:
    folder = config.pipeline.run_dir
    root = next(path for path in (folder, *folder.parents) if path.exists())
    writable = root.is_dir() and os.access(root, os.W_OK | os.X_OK)
    yield Check(
        "config.run_dir",
        Status.OK if writable else Status.FAIL,
        f"{root} {'can' if writable else 'cannot'} be written to",
        "a folder of this user",
        "choose another pipeline.run_dir, or change its owner",
    )
    need = disk_need(config)
    free = f"{size(need.free)} free at {need.folder}"
    yield Check("config.disk", Status.OK if need.fits else Status.FAIL, free, need.text(), FIX)


def _preflight(config: RunConfig) -> Iterator[Check]:
    """Take the look that the run itself takes first: it also finds functions of the user's own."""
    check_before_start(config)
    yield Check("config.preflight", Status.OK, "the run's own look before it starts finds nothing")


def _foreign(config: RunConfig) -> Iterator[Check]:
    """Ask engines of somebody else whether they fit; the run's own get what it needs as arguments."""
    for engine in look_at_foreign(config):
        yield Check(
            "config.engines",
            Status.FAIL if engine.problems else Status.OK if engine.asked else Status.WARN,
            f"{engine.url}: {'; '.join(engine.problems) or engine.seen}",
            "an engine that says what it serves, and serves what the run needs",
            "start it with VLLM_SERVER_DEV_MODE=1 and the arguments named here",
        )


def _placement(config: RunConfig, machine: Machine) -> Iterator[Check]:
    """Place the run as it will be placed; what is refused then is refused now."""
    seats = place(config, machine.platform, machine.environ)
    yield Check("config.placement", Status.OK, "; ".join(seats.describe()) or "engines of somebody else")
    yield Check("config.sharing", Status.OK, str(choose(config, seats)))


def _memory(config: RunConfig, machine: Machine) -> Iterator[Check]:
    shape = check_model(config.model.path)
    if machine.platform is Platform.CPU:
        needs = cpu_needs(config, trainer_plan(config), shape, machine.host_bytes)
    elif not machine.devices:
        yield Check(
            "config.memory",
            Status.FAIL,
            "no device can be asked for its memory",
            "at least one visible GPU",
            "see the checks of devices",
        )
        return
    else:
        seats = place(config, machine.platform, machine.environ)
        smallest = min(device.total for device in machine.devices)
        needs = budget(settle(config, seats, smallest), seats, smallest)
    for need in needs:
        yield _judge(need)
    yield from _staging(config, shape, machine)


def _judge(need: PhaseNeed) -> Check:
    status = Status.FAIL if not need.fits else Status.WARN if need.total > TIGHT * need.budget else Status.OK
    label = need.name.replace(" ", "-")
    return Check(f"config.memory.{label}", status, need.text(), f"at most {size(need.budget)}", need.fix)


def _staging(config: RunConfig, shape: ModelShape, machine: Machine) -> Iterator[Check]:
    """Weights that travel by shared memory need room there; GPU memory handles need none."""
    if choose(config, place(config, machine.platform, machine.environ)).transport != "shm":
        return
    needed = count_parameters(shape) * WIDTHS[config.trainer.dtype] * config.trainer.data_parallel
    yield Check(
        "config.shm",
        Status.OK if machine.shm_bytes > needed else Status.FAIL,
        f"{size(machine.shm_bytes)} free in /dev/shm",
        f"more than {size(needed)} of staged weights",
        "start the container with --ipc=host, or set sync.transport",
    )
