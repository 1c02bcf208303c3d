"""Two small things that asyncio lacks: all or nothing, and a bound on work whose parts weigh more than one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


async def all_of(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run side by side and return the results in order; the first error cancels the others.

    It is raised as it is (a task group would wrap it), and not before all of them have ended.

    Args:
        work: Not started yet.
    """
    tasks = [asyncio.create_task(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Slots:
    """A bound on what is in work at a time: first come, first served, however many slots each takes.

    What came later waits behind what came first even where it would fit, so that large work is not starved by small.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        """Begin with all of them free."""
        self._count = self._free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, count: int = 1) -> AsyncIterator[None]:
        """Hold so many slots while the block runs, waiting for them first.

        Args:
            count: How many; more than there are takes all.
        """
        wanted = min(count, self._count)
        await self._take(wanted)
        try:
            yield
        finally:
            self._free += wanted
            self._serve()

    async def _take(self, wanted: int) -> None:
        if not self._waiting and wanted <= self._free:
            self._free -= wanted
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # they were given in the very moment in which the wait was cancelled
                self._free += wanted
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if wanted > self._free:
                    return
                self._free -= wanted
                turn.set_result(None)
            self._waiting.popleft()
