"""What the routes need of vLLM's engine client, and nothing else of it."""

from __future__ import annotations

from typing import Any

from vime_sync.errors import EngineError


class EngineControl:
    """A thin adapter over `vllm.engine.protocol.EngineClient`."""

    def __init__(self, client: Any) -> None:
        """Wrap the client (None on a server without an engine)."""
        self._client = client

    @property
    def client(self) -> Any:
        """The engine client.

        Raises:
            EngineError: On a server that has no engine.
        """
        if self._client is None:
            raise EngineError("this server has no engine")
        return self._client

    async def workers(self, message: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Send a message to every worker of the engine and collect the answers.

        Raises:
            EngineError: If the engine is dead or a worker did not answer in time.
        """
        try:
            replies = await self.client.collective_rpc("vime_sync", timeout=deadline, args=(message,))
        except Exception as cause:
            raise EngineError(
                "the engine's workers did not answer",
                where=str(message.get("op")),
                seen=f"{type(cause).__name__}: {cause}",
                fix="look at the engine's log; a dead worker needs a restart",
            ) from cause
        return [dict(reply) for reply in replies]

    async def is_paused(self) -> bool:
        """Whether the scheduler is paused."""
        return bool(await self.client.is_paused())

    async def pause(self, mode: str) -> None:
        """Pause the scheduler and drop prefix, multi-modal and encoder caches.

        `AsyncLLM.pause_generation` does the same and then sleeps 20 ms, so that outputs of aborted requests are
        delivered before it returns. That order is of no use to a commit, so the engine core is asked directly.
        """
        await self.client.renderer.clear_mm_cache_async()
        await self.client.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def resume(self) -> None:
        """Let the scheduler go on."""
        await self.client.resume_generation()

    async def publish(self, label: str) -> None:
        """Make `label` the version that every token generated from now on carries; caches went with the pause.

        Args:
            label: The version as text.
        """
        await self.client.update_weight_version(label)

    async def label(self) -> str:
        """The version label that tokens carry."""
        return str(await self.client.get_weight_version())
