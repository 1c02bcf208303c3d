"""The worker extension: one method that answers, so that a refusal or a report gets back to the API server."""

from __future__ import annotations

from typing import Any

from vime_sync.errors import NotStartedError, to_wire


class SyncWorker:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    weight_transfer_engine: Any

    def vime_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        """Hand a message to the worker's receiver.

        Args:
            message: See `vime_sync.receiver.Receiver.handle`.

        Returns:
            The receiver's answer.
        """
        receiver = getattr(getattr(self, "weight_transfer_engine", None), "receiver", None)
        if receiver is None:
            missing = NotStartedError(
                "this worker has no vime backend", fix='start the engine with engine_arguments() (backend "vime")'
            )
            return {"ok": False, **to_wire(missing)}
        answer: dict[str, Any] = receiver.handle(message)
        return answer
