"""Over-sampling: begin more prompts than needed, drop groups that teach nothing, cancel what is no longer needed.

A group whose rewards are all equal has zero advantage everywhere (DAPO, arXiv:2503.14476, section 3.2, calls leaving
such groups out dynamic sampling). Which groups make up the batch must not depend on which engine was quick, or short
answers would be trained on more often than long ones and no run could be repeated. So groups are decided in the order
of their prompts: the batch is the first ``wanted`` prompts whose groups are kept, whatever finished first. The unused
prompts come first in the next step, so the walk over the data does not depend on timing either.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vime_rollout.errors import EngineTimeoutError, RolloutError
from vime_rollout.filters import GroupFilter, differing_rewards, reason_to_drop
from vime_rollout.rollout import Rollout
from vime_rollout.sample import Prompt, SampleGroup


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
        self.kept: dict[int, SampleGroup] = {}
        self.reasons: dict[int, str] = {}
        self.tasks: dict[asyncio.Task[SampleGroup], int] = {}
        self._rollout = rollout
        self._keep = keep
        self._version = version
        self._slots = asyncio.Semaphore(rollout.config.concurrency)

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
            group = task.result()
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
        version: As for ``Rollout.run``.

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
