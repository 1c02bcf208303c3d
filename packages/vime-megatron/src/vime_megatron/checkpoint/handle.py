"""What a caller holds of a save that may still be running."""

from __future__ import annotations

import threading
from pathlib import Path

from vime_megatron.errors import CheckpointError


class SaveHandle:
    """A save that may still be running.

    Args:
        folder: Where the checkpoint will be.

    Attributes:
        folder: The same.
        error: What went wrong; ``None`` while it runs and when it succeeded.
    """

    def __init__(self, folder: Path) -> None:
        """Start as running."""
        self.folder = folder
        self.error: CheckpointError | None = None
        self._done = threading.Event()
        self._told = False

    @property
    def done(self) -> bool:
        """The save has ended, well or not."""
        return self._done.is_set()

    def wait(self, deadline_s: float) -> None:
        """Wait until the checkpoint is on disk under its name.

        Args:
            deadline_s: Longest wait, in seconds.

        Raises:
            CheckpointError: It could not be written (nothing was published), or is still being written.
        """
        if not self._done.wait(deadline_s):
            raise CheckpointError(
                "the checkpoint is still being written",
                where=str(self.folder),
                seen=f"not complete after {deadline_s:g} s",
                fix="wait longer: the save goes on, and until it is complete the folder is as it was",
            )
        self._told = True
        if self.error is not None:
            raise self.error

    def settle(self, deadline_s: float) -> None:
        """Wait as :meth:`wait` does, but raise a failure only if nobody was told of it."""
        told = self._told
        try:
            self.wait(deadline_s)
        except CheckpointError:
            if not told or not self.done:
                raise

    def finish(self, error: CheckpointError | None = None) -> None:
        """End it."""
        self.error = error
        self._done.set()
