"""The memory of a run on GPUs, held against the devices before anything is started.

A phase that does not fit would end the run minutes later, out of memory, in whichever process asked last. Here it is
named at once, with who holds what in it. `vime_integration.needs` has the arithmetic.
"""

from __future__ import annotations

import logging

from vime_devices import Platform
from vime_grpo import RunConfig
from vime_megatron import check_model
from vime_megatron.memory import MemoryPlan, plan_memory

from vime_integration.device_memory import ask_memory
from vime_integration.errors import PlacementError
from vime_integration.needs import GIB, PhaseNeed, Sharing, gpu_needs
from vime_integration.placement import Placement
from vime_integration.sharing import choose, offloads, sleeps

logger = logging.getLogger(__name__)


#: Of a device, that must be left over, in each phase that it makes fuller, before state stays that could leave.
SPARE = 0.10


def check_budget(config: RunConfig, placement: Placement) -> RunConfig:
    """Check that every phase fits into the smallest device; on a CPU `vime-grpo doctor` tells, and nothing is refused.

    Returns:
        The configuration with ``trainer.offload`` settled; see `settle`.

    Raises:
        PlacementError: A phase does not fit, or no device can be asked.
    """
    if placement.platform is Platform.CPU:
        return config
    try:
        devices = ask_memory()
    except (RuntimeError, TimeoutError) as error:
        raise PlacementError(
            "the devices cannot be asked for their memory", seen=str(error), fix="run `vime-grpo doctor`"
        ) from error
    smallest = min(device.total for device in devices)
    settled = settle(config, placement, smallest)
    try:
        refuse_misfits(budget(settled, placement, smallest))
    except PlacementError as error:
        if config.pipeline.memory_check == "stop":
            raise
        logger.warning("tried nevertheless, as pipeline.memory_check says: %s", error)
    return settled


def settle(config: RunConfig, placement: Placement, device_bytes: int) -> RunConfig:
    """Decide an open ``trainer.offload``: state that fits beside the engines stays, for moving it costs time each step.

    Only the phases in which it would be away are asked. How full another is, such as training, moving does not change.

    Args:
        config: The run.
        placement: Where each process runs.
        device_bytes: Memory of the smallest device.

    Returns:
        The configuration with "on" or "off" in the place of "auto", where the trainer could make room.
    """
    if config.trainer.offload != "auto" or not offloads(config, placement):
        return config
    keeping, moving = _with_offload(config, "off"), _with_offload(config, "on")
    pairs = zip(budget(keeping, placement, device_bytes), budget(moving, placement, device_bytes), strict=True)
    fuller = [kept for kept, moved in pairs if kept.total > moved.total]
    if all(phase.total <= (1 - SPARE) * phase.budget for phase in fuller):
        logger.info("gradients and optimiser stay on the device while engines generate: there is room for both")
        return keeping
    return moving


def _with_offload(config: RunConfig, switch: str) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"offload": switch})})


def budget(config: RunConfig, placement: Placement, device_bytes: int) -> list[PhaseNeed]:
    """Return what each phase of a run needs of one GPU.

    Args:
        config: The run.
        placement: Where each process runs.
        device_bytes: Memory of the smallest device.
    """
    shape = check_model(config.model.path)
    return gpu_needs(config, trainer_plan(config), shape, device_bytes, sharing_of(config, placement))


def trainer_plan(config: RunConfig) -> MemoryPlan:
    """Return the trainer's memory on its fullest rank."""
    from vime_integration.actors.trainer import trainer_config  # late: it imports torch and Megatron

    return plan_memory(trainer_config(config), world_size=config.trainer.world_size)


def sharing_of(config: RunConfig, placement: Placement) -> Sharing:
    """Return who gives back what, as the pipeline decides it."""
    aliased = choose(config, placement).mode == "alias"
    return Sharing(sleeps(config, placement), offloads(config, placement), aliased)


def refuse_misfits(needs: list[PhaseNeed]) -> None:
    """Log every phase, and raise if one does not fit.

    Raises:
        PlacementError: Names the phases, their parts and the budget.
    """
    for need in needs:
        logger.info("memory of %s: %s, budget %.2f GiB", need.name, need.text(), need.budget / GIB)
    misfits = [need for need in needs if not need.fits]
    if misfits:
        raise PlacementError(
            "the run does not fit into the memory of a device",
            where=", ".join(need.name for need in misfits),
            seen="; ".join(f"{need.name}: {need.text()}" for need in misfits),
            expected=f"at most {misfits[0].budget / GIB:.2f} GiB",
            fix="; ".join(dict.fromkeys(need.fix for need in misfits))
            + '; or try it nevertheless with pipeline.memory_check = "warn"',
        )
