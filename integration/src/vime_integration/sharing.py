"""Whether engines run on the trainer's memory, copy from it, or sleep beside it; decided before anything starts.

=========== =================== =======================================================================================
pipeline    where               what is chosen with everything on "auto"
=========== =================== =======================================================================================
colocated   GPU                 aliased: one copy of the weights; before engines generate, where little is free, the
                                trainer gives back what its allocator keeps unused and, where there is no room for both
                                then, its optimiser and gradients leave the GPU (`vime_integration.budget`)
colocated   CPU                 copied through shared memory: there is nothing to save, and trainer and engines start
                                at the same time; ``sync.mode = "alias"`` runs engines on the trainer's memory here too
async       anywhere            copied: an engine that generates while the trainer writes needs weights of its own;
                                with ``pipeline.pools = "shared"`` both live on the same GPUs, each in its share
=========== =================== =======================================================================================

With several trainer replicas each engine runs on the one that is on its own devices. An aliased engine does not sleep:
sleeping takes an engine's weights away, and these would be the trainer's. Who wants the engines' cache memory during
training sets ``engine.sleep = "on"``, and the weights are copied.
"""

from __future__ import annotations

from vime_devices import Platform
from vime_grpo import RunConfig
from vime_sync import Choice, choose_transport

from vime_integration.errors import PlacementError
from vime_integration.placement import Placement, apart


def choose(config: RunConfig, placement: Placement) -> Choice:
    """Choose how weights get into the engines.

    Args:
        config: The run's configuration.
        placement: Where every process runs.

    Raises:
        AliasError: The configuration asks for aliased engines where there can be none; with every reason.
        TransportError: The transport cannot carry this placement.
        PlacementError: The configuration contradicts itself.
    """
    always = config.pipeline.mode == "async"  # engines generate while the trainer writes
    mode = config.sync.mode
    if mode == "alias" and always:
        raise PlacementError(
            "asynchronous engines cannot run on the trainer's memory",
            seen='sync.mode = "alias" with pipeline.mode = "async"',
            expected="engines that generate from whole weights while the trainer writes the next ones",
            fix='set sync.mode = "copy" or "auto"',
        )
    if mode == "auto" and (always or placement.platform is Platform.CPU or config.engine.urls):
        mode = "copy"
    return choose_transport(
        placement.platform,
        same_devices=not config.engine.urls and _same_devices(placement),
        transport=config.sync.transport,
        mode=mode,
        sleep_mode=sleeps(config, placement),
    )


def shares_devices(config: RunConfig, placement: Placement) -> bool:
    """Return whether a trainer rank and an engine sit on the same GPU."""
    return placement.platform is not Platform.CPU and not apart(config)


def sleeps(config: RunConfig, placement: Placement) -> bool:
    """Return whether engines give memory back while the trainer works."""
    return config.engine.sleep == "on" and placement.platform is not Platform.CPU


def offloads(config: RunConfig, placement: Placement) -> bool:
    """Return whether the trainer gives memory back while engines generate."""
    section = config.trainer.offload
    if config.pipeline.mode == "async":
        return False  # it trains while engines generate
    return section == "on" or (section == "auto" and placement.platform is not Platform.CPU)


def makes_room(config: RunConfig, placement: Placement) -> bool:
    """Return whether the trainer makes room for engines: of what its allocator keeps unused, at least."""
    return offloads(config, placement) or (config.engine.count > 0 and shares_devices(config, placement))


def _same_devices(placement: Placement) -> bool:
    """Tell whether rank r and the engines' worker r sit on the same device, for every rank."""
    workers = [device for engine in placement.engines for device in engine.devices]
    ranks = [device for trainer in placement.trainers for device in trainer.devices]
    return workers == ranks
