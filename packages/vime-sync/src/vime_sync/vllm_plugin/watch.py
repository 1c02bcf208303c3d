"""An engine that runs on a trainer's memory watches the trainer.

Device memory that a dead process exported may stay readable for as long as it is mapped, or may not; and a trainer that
was killed in the middle of a write leaves weights that are no version at all. So the API server of an aliased engine
looks every half second whether the trainer's processes live. When one is gone the engine is paused, its requests are
aborted, and `vime_sync.vllm_plugin.guard` answers every new one with the reason. There is nothing to send it: it has to
be started again, on the memory of a living trainer.

The watch also ends a write that nobody will finish: if the controller that opened it has died, it is given up, and the
engine goes on with what it served if the trainer had not begun to write.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from vime_sync.errors import SyncError
from vime_sync.process import is_dead

if TYPE_CHECKING:
    from vime_sync.vllm_plugin.routes import SyncServer

logger = logging.getLogger(__name__)
PERIOD_S = 0.5


async def watch_trainers(server: SyncServer, period_s: float = PERIOD_S) -> None:
    """Watch for as long as the server runs; returns at once if nothing is aliased.

    Args:
        server: The engine's transaction.
        period_s: Seconds between looks.
    """
    trainers: list[Any] = []
    try:
        for reply in await server.engine.workers({"op": "state"}, 60.0):
            trainers += reply.get("trainers", [])
    except SyncError:
        logger.exception("vime-sync: whether the weights are aliased is unknown; the trainer is not watched")
    while trainers:
        await asyncio.sleep(period_s)
        dead = [trainer for trainer in trainers if is_dead(trainer)]
        if dead:
            reason = f"the weights lie in the memory of a trainer process that has ended: {dead[0]}"
            logger.error("vime-sync: %s; this engine serves no more", reason)
            await server.condemn(reason)
            return
        if server.opened_by is not None and is_dead(server.opened_by):
            logger.error("vime-sync: the controller %s died while weights were open", server.opened_by)
            await server.handle("abort", {"session": server.session})
