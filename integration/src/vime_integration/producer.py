"""Generation that goes on by itself: begins prompts while the lag rule allows it, hands out batches in data order.

There is no loop that polls. Whatever may make room (a group that is done, a batch that is taken, weights that changed)
calls ``_fill``, which begins as many prompts as `vime_integration.admission` allows. The weights may change under a
running generation; each token carries the version that sampled it.

Invariants. Every prompt that is drawn is in exactly one place: in flight, inside the buffer, waiting to be generated
again, trained, or dropped with a reason; ``state_dict`` is taken between two steps of the event loop and never sees one
on its way. The first error of any group is kept and raised by whoever waits, now or next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from vime_rollout import DataBuffer, GroupFilter, Prompt, SampleGroup, Slots

from vime_integration.admission import admissible
from vime_integration.errors import PipelineError
from vime_integration.ledger import LedgerEntry
from vime_integration.worktime import Worked, WorkTime

logger = logging.getLogger(__name__)

#: A filter that drops this many batches' worth of groups in a row drops everything there is.
BARREN_BATCHES = 10


class Source(Protocol):
    """Where prompts come from; vime-rollout's data sources fit."""

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        ...


class Generator(Protocol):
    """What makes groups; vime-rollout's ``Rollout`` fits."""

    async def group(self, prompt: Prompt, *, version: int | None = None, slots: Slots | None = None) -> SampleGroup:
        """Return the scored group of one prompt."""
        ...


@dataclass(frozen=True)
class Taken:
    """One batch, and how the two sides waited for each other.

    Attributes:
        groups: In the order of their prompts.
        ledger: What became of prompts since the last batch.
        waited_s: Seconds that training waited for generation.
        worked: When generation worked since the last batch, and when this one was made.
        metrics: ``queue/*``: groups ready and in flight after this batch was taken, and counts since the run's start.
    """

    groups: list[SampleGroup]
    ledger: LedgerEntry
    waited_s: float
    worked: Worked
    metrics: dict[str, float]


class Producer:
    """Keeps generation going; belongs to one event loop.

    Args:
        generator: Makes a scored group of a prompt.
        source: Where prompts come from.
        batch: Groups of one step.
        max_lag: Largest lag that may be trained on, in versions.
        concurrency: Most samples in work at a time.
        capacity: Most groups that may wait for the trainer, at least ``batch``; None bounds them by the lag alone.
        on_expired: What becomes of a group that is too old all the same (after a resume, or a change of ``max_lag``).
        keep: Decides about a group: "" keeps it, a reason drops it.
    """

    def __init__(
        self,
        generator: Generator,
        source: Source,
        *,
        batch: int,
        max_lag: int,
        concurrency: int,
        capacity: int | None = None,
        on_expired: Literal["drop", "refresh"] = "refresh",
        keep: GroupFilter = lambda _group: "",
    ) -> None:
        """Begin nothing yet."""
        self._generator, self._source, self._on_expired = generator, source, on_expired
        self._buffer = DataBuffer(max_lag=max_lag, on_expired=on_expired)
        self._batch, self._max_lag, self._capacity, self._keep = batch, max_lag, capacity, keep
        self._slots = Slots(concurrency)
        self._tasks: dict[asyncio.Task[SampleGroup], Prompt] = {}
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None
        self._versions: tuple[int, int] | None = None  # the next batch's, and the engines'
        self._entry = LedgerEntry()
        self._barren = self._filtered = 0
        self._times = WorkTime()

    def start(self, version: int) -> None:
        """Begin to generate, with engines that serve ``version``, for a trainer that holds the same."""
        self._versions = (version, version)
        self._fill()

    def weights_changed(self, version: int) -> None:
        """Note that every engine serves ``version`` now."""
        next_version, _ = self._running()
        self._versions = (max(next_version, version), version)
        self._fill()

    async def take(self, version: int, *, deadline_s: float) -> Taken:
        """Return the batch that weights of ``version`` train on.

        Raises:
            PipelineError: It was not complete in time, or the filter drops everything.
            Exception: The first error of any group.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                while not self._is_ready(version):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise PipelineError(
                "generation did not make a batch in time",
                seen=f"{len(self._buffer)} groups ready and {len(self._tasks)} in flight after {deadline_s:g} s",
                expected=f"the next {self._batch} prompts answered and scored",
                fix="raise rollout.request_deadline_s, or lower rollout.batch_size or rollout.max_response_tokens",
            ) from error
        groups = self._buffer.take(self._batch, version=version)
        entry, self._entry = self._entry, LedgerEntry()
        entry.trained = [group.prompt.position for group in groups]
        _, engines = self._running()
        self._versions = (version + 1, engines)
        self._fill()
        worked = self._times.taken(group.prompt.group_id for group in groups)
        return Taken(groups, entry, time.monotonic() - began, worked, self._metrics(version))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and every prompt that is on its way, as JSON values."""
        return {
            "source": self._source.state_dict(),
            "buffer": self._buffer.state_dict(),
            "filtered": self._filtered,
            "entry": self._entry.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; prompts that were in flight are generated again.

        Raises:
            StateError: It belongs to other data.
        """
        self._source.load_state_dict(state["source"])
        self._buffer.load_state_dict(state["buffer"])
        self._filtered = int(state["filtered"])
        dropped, replayed = (
            [(int(p), str(why)) for p, why in state["entry"][kind]] for kind in ("dropped", "replayed")
        )
        self._entry = LedgerEntry(dropped=dropped, replayed=replayed)
        lost = [Prompt.from_dict(prompt) for prompt in state["buffer"]["in_flight"]]
        self._entry.replayed += [(prompt.position, "in flight when the run ended") for prompt in lost]

    async def stop(self) -> None:
        """Cancel what is in flight."""
        self._versions = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_ready(self, version: int) -> bool:
        if self._failed is not None:
            raise self._failed
        expired = self._entry.replayed if self._on_expired == "refresh" else self._entry.dropped
        for prompt in self._buffer.expire(version):
            self._times.forget(prompt.group_id)
            expired.append((prompt.position, f"too old for version {version}"))
        self._fill()
        return self._buffer.ready(self._batch)

    def _fill(self) -> None:
        if self._versions is None or self._failed is not None:
            return
        next_version, engines = self._versions
        room = admissible(
            batch=self._batch,
            max_lag=self._max_lag,
            next_version=next_version,
            engine_version=engines,
            waiting=len(self._buffer) + self._buffer.in_flight,
            capacity=self._capacity,
        )
        prompts = self._buffer.replays(room)
        prompts += self._source.next(room - len(prompts)) if room > len(prompts) else []
        self._buffer.begin(prompts)
        for prompt in prompts:
            task = asyncio.create_task(self._generator.group(prompt, slots=self._slots), name=prompt.group_id)
            self._tasks[task] = prompt
            self._times.begin(prompt.group_id)
            task.add_done_callback(self._done)
        self._times.working(bool(self._tasks))

    def _done(self, task: asyncio.Task[SampleGroup]) -> None:
        prompt = self._tasks.pop(task)
        if task.cancelled():
            return
        try:
            self._settle(prompt, task.result())
            self._fill()
        except Exception as error:
            logger.exception("group %s failed", prompt.group_id)
            self._failed = self._failed or error
        self._changed.set()

    def _settle(self, prompt: Prompt, group: SampleGroup) -> None:
        reason = self._keep(group)
        if not reason:
            self._buffer.admit(group)
            self._times.done(prompt.group_id)
            self._barren = 0
            return
        self._times.forget(prompt.group_id)
        self._buffer.abandon(prompt.group_id)
        self._entry.dropped.append((prompt.position, reason))
        self._filtered += 1
        self._barren += 1
        if self._barren >= BARREN_BATCHES * self._batch:
            raise PipelineError(
                "the filter drops every group",
                where="rollout.filter",
                seen=f"{self._barren} groups dropped in a row, the last because {reason}",
                expected="groups that teach something",
                fix="choose tasks that the policy sometimes solves, or another filter",
            )

    def _running(self) -> tuple[int, int]:
        if self._versions is None:
            raise PipelineError("generation was not started", fix="call start() first")
        return self._versions

    def _metrics(self, version: int) -> dict[str, float]:
        counts = self._buffer.counts
        return {
            "queue/ready": float(len(self._buffer)),
            "queue/in_flight": float(self._buffer.in_flight),
            "queue/oldest_lag": float(max(self._buffer.lags(version), default=0)),
            "queue/begun": float(counts.begun),
            "queue/trained": float(counts.taken),
            "queue/expired_dropped": float(counts.expired_dropped),
            "queue/expired_refreshed": float(counts.expired_refreshed),
            "queue/filtered": float(self._filtered),
        }
