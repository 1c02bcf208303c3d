"""Over-sampling: begin more prompts than needed, drop groups that teach nothing, cancel what is no longer needed.

A group whose rewards are all equal has zero advantage everywhere (DAPO, arXiv:2503.14476, section 3.2, calls leaving
such groups out dynamic sampling). Which groups make up the batch must not depend on which engine was quick, or short
answers would be trained on more often than long ones and no run could be repeated. So groups are decided in the order
of their prompts: the batch is the first ``wanted`` prompts whose groups are kept, whatever finished first. The unused
prompts come first in the next step, so the walk over the data does not depend on timing either.

Once the batch is decided, what still runs is not needed. Without partial samples it is cancelled, and generated again
in the next step. With them (``Rollout(partial=PartialSamples())``) its requests are aborted in the engines, which
answer with the tokens they have, and the next step goes on from there (``vime_rollout.partial``): tokens of several
versions, none generated twice. How far each got depends on timing then, and with it what is sampled and kept.

``Collector`` keeps prompts and partial samples from step to step, and its state is JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vime_rollout.errors import EngineError, EngineTimeoutError, RolloutError, StateError
from vime_rollout.filters import GroupFilter, differing_rewards, reason_to_drop
from vime_rollout.rollout import Rollout
from vime_rollout.sample import Prompt, SampleGroup
from vime_rollout.together import Slots

logger = logging.getLogger(__name__)

_FORMAT = 1
_CUT_AGAIN_S = 0.1
#: How long what is cut may take to come back with its tokens.
_CUT_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Collection:
    """What came of an over-sampled step. Every prompt drawn is in exactly one of the three.

    Args:
        groups: The kept groups, in the order of their prompts.
        dropped: Prompts whose group was dropped, with the reason.
        unused: Prompts that were begun and not needed: hand them to the next step.
    """

    groups: tuple[SampleGroup, ...]
    dropped: tuple[tuple[Prompt, str], ...]
    unused: tuple[Prompt, ...]

    @property
    def reasons(self) -> Mapping[str, int]:
        """How many groups were dropped for which reason."""
        return Counter(reason for _, reason in self.dropped)


class _Run:
    """The prompts of one step, in order, with their tasks and decisions."""

    def __init__(self, rollout: Rollout, keep: GroupFilter, version: int | None) -> None:
        self.prompts: list[Prompt] = []
        self.done: dict[int, SampleGroup] = {}
        self.kept: dict[int, SampleGroup] = {}
        self.reasons: dict[int, str] = {}
        self.tasks: dict[asyncio.Task[SampleGroup], int] = {}
        self._rollout = rollout
        self._keep = keep
        self._version = version
        self._slots = Slots(rollout.config.concurrency)

    def begin(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            work = self._rollout.group(prompt, version=self._version, slots=self._slots)
            self.tasks[asyncio.create_task(work, name=prompt.group_id)] = len(self.prompts)
            self.prompts.append(prompt)

    async def decide_some(self) -> int:
        """Wait until a group is done; return how many were dropped."""
        done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        before = len(self.reasons)
        for task in sorted(done, key=lambda t: t.exception() is None):  # a failure goes first
            place = self.tasks.pop(task)
            group = self.done[place] = task.result()
            if reason := reason_to_drop(self._keep, group):
                self.reasons[place] = reason
            else:
                self.kept[place] = group
        return len(self.reasons) - before

    def end_of_batch(self, wanted: int) -> int | None:
        """Return how many prompts, from the first, make the batch; ``None`` while that is not decided."""
        count = 0
        for place in range(len(self.prompts)):
            if place not in self.kept and place not in self.reasons:
                return None
            count += place in self.kept
            if count == wanted:
                return place + 1
        return None

    async def cut(self, end: int) -> None:
        """Keep what there is of the prompts from ``end`` on; what does not come back in time is cancelled."""
        partial = self._rollout.partial
        if partial is None:
            return
        partial.cutting = True
        try:
            async with asyncio.timeout(_CUT_DEADLINE_S):
                while pending := [task for task in self.tasks if not task.done()]:
                    # Again and again: a request may have been on its way to the engine when the others were aborted.
                    await self._rollout.engine.abort(partial.requests)
                    await asyncio.wait(pending, timeout=_CUT_AGAIN_S)
        except (TimeoutError, EngineError) as error:
            logger.warning("%d groups are generated again where they were not kept: %r", len(pending), error)
        finally:
            partial.cutting = False
        # Whole groups are kept as well, also those that came in after the batch was decided.
        late = [t.result() for t in self.tasks if t.done() and not t.cancelled() and t.exception() is None]
        for group in [*late, *(group for place, group in self.done.items() if place >= end)]:
            partial.keep_group(group)

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def collect(
    rollout: Rollout,
    draw: Callable[[int], list[Prompt]],
    wanted: int,
    *,
    ahead: int = 0,
    keep: GroupFilter = differing_rewards,
    max_prompts: int | None = None,
    version: int | None = None,
) -> Collection:
    """Collect ``wanted`` groups that pass a filter.

    Args:
        rollout: Generates and scores.
        draw: Returns the next n prompts (``DataSource.next``).
        wanted: Groups needed.
        ahead: Prompts begun beyond those that are needed, so that a drop costs no wait.
        keep: Decides about a group.
        max_prompts: Most prompts drawn; by default ten times ``wanted`` and those ahead.
        version: As for ``Rollout.run``; with partial samples, of the tokens that this step makes.

    Raises:
        EngineTimeoutError: When the step passed the rollout's deadline.
        RolloutError: The first error of any sample, or too few groups pass the filter; with the reasons.
    """
    limit = 10 * wanted + ahead if max_prompts is None else max_prompts
    run = _Run(rollout, keep, version)
    try:
        async with asyncio.timeout(rollout.config.step_deadline_s):
            run.begin(draw(min(wanted + ahead, limit)))
            while (end := run.end_of_batch(wanted)) is None:
                if not run.tasks:
                    raise _too_few(run, wanted, limit)
                dropped = await run.decide_some()
                more = min(dropped, limit - len(run.prompts))
                if more and run.end_of_batch(wanted) is None:
                    run.begin(draw(more))
        await run.cut(end)
    except TimeoutError as error:
        raise EngineTimeoutError(
            "over-sampled step passed its deadline",
            where=rollout.engine.name,
            seen=f"{len(run.kept)} groups kept and {len(run.reasons)} dropped of {len(run.prompts)} prompts",
            expected=f"{wanted} groups in {rollout.config.step_deadline_s:g} s",
        ) from error
    finally:
        await run.cancel()
    groups = tuple(run.kept[place] for place in range(end) if place in run.kept)
    dropped_prompts = tuple((run.prompts[place], run.reasons[place]) for place in range(end) if place in run.reasons)
    return Collection(groups, dropped_prompts, tuple(run.prompts[end:]))


def _too_few(run: _Run, wanted: int, limit: int) -> RolloutError:
    reasons = Counter(run.reasons.values()).most_common(3)
    return RolloutError(
        "too few groups pass the filter",
        seen=f"{len(run.kept)} of {len(run.prompts)} prompts; dropped: {reasons}",
        expected=f"{wanted} groups from at most {limit} prompts",
        fix="change the tasks' difficulty or the filter, or raise max_prompts",
    )


class Collector:
    """Over-samples step after step: hands on unused prompts and partial samples, and saves both.

    Args:
        rollout: Generates and scores; with ``partial`` where cut samples are to be gone on with.
        draw: Returns the next n prompts (``DataSource.next``).
        keep: Decides about a group.
        ahead: Prompts begun beyond those that are needed.
        max_prompts: As for ``collect``.
    """

    def __init__(
        self,
        rollout: Rollout,
        draw: Callable[[int], list[Prompt]],
        *,
        keep: GroupFilter = differing_rewards,
        ahead: int = 0,
        max_prompts: int | None = None,
    ) -> None:
        """Begin with no prompts waiting."""
        self._rollout = rollout
        self._draw_new = draw
        self._keep = keep
        self._ahead = ahead
        self._max_prompts = max_prompts
        self._waiting: list[Prompt] = []

    @property
    def waiting(self) -> tuple[Prompt, ...]:
        """Prompts that were begun and not needed, in order; the next step begins with them."""
        return tuple(self._waiting)

    async def step(self, wanted: int, *, version: int | None = None) -> Collection:
        """Collect ``wanted`` groups; see ``collect``."""
        done = await collect(
            self._rollout,
            self._draw,
            wanted,
            ahead=self._ahead,
            keep=self._keep,
            max_prompts=self._max_prompts,
            version=version,
        )
        self._waiting = [*done.unused, *self._waiting]
        return done

    def _draw(self, n: int) -> list[Prompt]:
        first, self._waiting = self._waiting[:n], self._waiting[n:]
        return [*first, *self._draw_new(n - len(first))]

    def state_dict(self) -> dict[str, Any]:
        """Return waiting prompts and partial samples as JSON values; between steps."""
        partial = self._rollout.partial
        return {
            "format": _FORMAT,
            "waiting": [prompt.to_dict() for prompt in self._waiting],
            "partial": None if partial is None else partial.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Partial samples are only restored into a rollout that keeps them.

        Raises:
            StateError: When it has another format.
        """
        if state.get("format") != _FORMAT:
            raise StateError("collector state of another format", seen=str(state.get("format")), expected=str(_FORMAT))
        self._waiting = [Prompt.from_dict(values) for values in state["waiting"]]
        if self._rollout.partial is not None and state["partial"] is not None:
            self._rollout.partial.load_state_dict(state["partial"])
