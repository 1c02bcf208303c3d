"""Prompts to scored groups: generate n samples of each prompt, score each when it is done, hand on whole groups.

Repeatability. The seed of a sample is a hash of (run seed, group id) plus its index, so it depends neither on the order
in which requests are sent, nor on the engine that serves them, nor on how many there are; a run with the same data,
seeds and weights samples the same tokens. The seeds of a group follow each other as vLLM counts them up within a
request for several samples, so a sample is the same whether it was asked for alone or with the others of its group.

Failure. The first error ends the step: all other requests are cancelled (the engine drops what it no longer serves),
and the error is raised as it is, with a note that names the sample. The step has a deadline of its own.

Versions. With ``version`` given, every token must come from it. Without, a sample may span versions (weights that
change in flight), and each token's version is recorded. A sample that was cut from outside is continued from its own
tokens: what was sampled is never sampled again, and keeps its logprobs and version.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vime_rollout.engine.remote import Engine
from vime_rollout.engine.request import Generation, SamplingParams
from vime_rollout.errors import EngineTimeoutError, RolloutError, SampleCutError, noting
from vime_rollout.partial import PartialSamples
from vime_rollout.rewards.base import Reward, name_of
from vime_rollout.rewards.grader import WorkerReward
from vime_rollout.sample import Prompt, Sample, SampleGroup
from vime_rollout.single_turn import assemble, begin_together, go_on, single_turn, whole
from vime_rollout.together import Slots, all_of
from vime_rollout.tokens import Encoder

#: Seeds are below two to the power of this; a group's samples count up from there, within vLLM's 63 bits.
_SEED_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How prompts become groups.

    Args:
        samples_per_prompt: Size of a group.
        sampling: How each response is sampled; ``max_tokens`` bounds it.
        max_context_tokens: Longest prompt and response together; the response is bounded by what the prompt leaves.
        seed: Seed of the run.
        concurrency: Most samples in work at a time, over all engines.
        step_deadline_s: Seconds for one call of ``run``.
        request_deadline_s: Seconds for one response; ``None`` takes the engine's.
        samples_per_request: Most samples of a prompt that one request asks for; ``None``: all that ``concurrency``
            allows. A request is answered when its last sample has ended, and vLLM refuses more than ``max_num_seqs``.
            With a generate function of one's own, or partial samples kept, each sample has its own request.
        sticky_groups: Send all samples of a prompt to one engine, which then computes the prompt once.
        max_turns: Most turns of the policy in one sample, for generate functions with several turns.
    """

    samples_per_prompt: int
    sampling: SamplingParams
    max_context_tokens: int
    seed: int = 0
    concurrency: int = 256
    step_deadline_s: float = 3600.0
    request_deadline_s: float | None = None
    samples_per_request: int | None = None
    sticky_groups: bool = False
    max_turns: int = 1

    def __post_init__(self) -> None:
        """Check what would hang or divide by nothing.

        Raises:
            RolloutError: Naming the field.
        """
        for name in ("samples_per_prompt", "concurrency", "samples_per_request"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RolloutError(f"rollout field {name}", seen=str(value), expected="at least 1")


class GenerateFunction(Protocol):
    """How one sample is made; replace it for multi-turn or tool use (``load_generate`` takes a dotted path).

    It gets the rollout (engine, encoder and configuration), an encoded prompt, the sample's index and the version asked
    for, and returns an unscored sample: the tokens that the engine sampled with ``loss_mask`` 1, their logprobs and
    versions as the engine gave them, everything else with ``loss_mask`` 0. A trajectory of several records (forks)
    returns all of them, in order; the last one is scored, and all get its score.
    """

    async def __call__(
        self, rollout: Rollout, prompt: Prompt, index: int, version: int | None
    ) -> Sample | Sequence[Sample]:
        """Make one sample."""
        ...


class Rollout:
    """Turns prompts into scored groups; see the module's docstring.

    Args:
        engine: An engine or a pool.
        encoder: Tokenizer and template of the model.
        reward: Scores samples.
        config: How.
        generate: Makes one sample; ``single_turn`` by default.
        partial: Keeps what was generated of groups that are cut, so that it is gone on from; ``None`` keeps nothing.

    Raises:
        RolloutError: When partial samples are kept with a generate function of one's own.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        reward: Reward,
        config: RolloutConfig,
        *,
        generate: GenerateFunction | None = None,
        partial: PartialSamples | None = None,
    ) -> None:
        """Keep the parts; they are started and stopped by their owners."""
        if partial is not None and generate not in (None, single_turn):
            raise RolloutError(
                "partial samples need the built-in generate function",
                seen=str(generate),
                expected="single_turn",
                fix="leave out partial: only tokens are kept, and not what a function of one's own knows",
            )
        self.engine = engine
        self.encoder = encoder
        self.reward = reward
        self.config = config
        self.partial = partial
        self._generate: GenerateFunction = generate or single_turn

    def with_config(self, config: RolloutConfig) -> Rollout:
        """Return a rollout of the same parts with another configuration; it keeps no partial samples."""
        return Rollout(self.engine, self.encoder, self.reward, config, generate=self._generate)

    async def run(self, prompts: Sequence[Prompt], *, version: int | None = None) -> list[SampleGroup]:
        """Return the scored groups of all prompts, in the order of the prompts.

        Args:
            prompts: Distinct prompts.
            version: Weights that every token must come from; ``None`` records whatever each comes from.

        Raises:
            EngineTimeoutError: When the step passed its deadline; says how many groups were done.
            RolloutError: The first error of any sample, with a note that names it.
        """
        groups: dict[str, SampleGroup] = {}
        try:
            async with asyncio.timeout(self.config.step_deadline_s):
                async for group in self.stream(prompts, version=version):
                    groups[group.prompt.group_id] = group
        except TimeoutError as error:
            raise EngineTimeoutError(
                "rollout step passed its deadline",
                where=self.engine.name,
                seen=f"{len(groups)} of {len(prompts)} groups after {self.config.step_deadline_s:g} s",
                fix="raise step_deadline_s, or lower batch size or response length",
            ) from error
        return [groups[prompt.group_id] for prompt in prompts]

    async def stream(self, prompts: Sequence[Prompt], *, version: int | None = None) -> AsyncIterator[SampleGroup]:
        """Yield scored groups as they are done. Leaving the iteration early cancels the rest.

        Args:
            prompts: Distinct prompts.
            version: As for ``run``.

        Raises:
            RolloutError: The first error of any sample, with a note that names it.
        """
        if len({p.group_id for p in prompts}) != len(prompts):
            raise RolloutError("a prompt is there twice", seen=str([p.group_id for p in prompts])[:200])
        slots = Slots(self.config.concurrency)
        tasks = {asyncio.create_task(self.group(p, version=version, slots=slots), name=p.group_id) for p in prompts}
        pending = tasks
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda t: t.exception() is None):  # a failure goes first
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def group(self, prompt: Prompt, *, version: int | None = None, slots: Slots | None = None) -> SampleGroup:
        """Return the scored group of one prompt.

        Args:
            prompt: The prompt.
            version: As for ``run``.
            slots: Shared bound on samples in work; ``None`` makes one of the configured size.

        Raises:
            RolloutError: The first error of any sample, with a note that names it.
            SampleCutError: When partial samples are kept and the group was cut; what there is of it is kept.
        """
        slots = slots or Slots(self.config.concurrency)
        prompt = self.encoder.encode(prompt)
        count, most = self.config.samples_per_prompt, self._most_together()
        pieces = [range(first, min(first + most, count)) for first in range(0, count, most)]
        made = await all_of(self._piece(prompt, piece, version, slots) for piece in pieces)
        records = [trajectory for piece in made for trajectory in piece]
        samples = [sample for trajectory in records if trajectory is not None for sample in trajectory]
        if None in records:
            raise SampleCutError(
                "group was cut", where=f"group {prompt.group_id}", seen=f"{len(samples)} of {count} done"
            )
        if self.partial is not None:
            self.partial.forget(prompt)
        return SampleGroup(prompt, tuple(samples))

    def _most_together(self) -> int:
        # Partial samples are cut by the name of their request. vLLM (0.28 to 0.32) keeps what it has of a request for
        # several samples that is cut by its name for as long as the server lives.
        if self._generate is not single_turn or self.partial is not None:
            return 1
        most = self.config.samples_per_request or self.config.samples_per_prompt
        return min(most, self.config.concurrency)

    async def _piece(
        self, prompt: Prompt, indices: range, version: int | None, slots: Slots
    ) -> list[tuple[Sample, ...] | None]:
        """Return the scored records of each of some samples, ``None`` for one that was cut to be gone on with later."""
        if len(indices) == 1:
            return [await self._alone(prompt, indices[0], version, slots)]
        async with slots.hold(len(indices)):
            with noting(f"samples {indices[0]} to {indices[-1]} of group {prompt.group_id}"):
                begun = dict(zip(indices, await begin_together(self, prompt, indices, version), strict=True))
            cut = {index: parts for index, parts in begun.items() if not whole(self, prompt, parts)}
            ended = {index: parts for index, parts in begun.items() if index not in cut}
            goes_on = (self._finish(prompt, index, version, parts) for index, parts in cut.items())
            work: list[Coroutine[Any, Any, Sequence[Sample]]] = [self._score_together(prompt, ended), *goes_on]
            at_once, *later = await all_of(work)
        made = {sample.index: (sample,) for sample in at_once} | {records[0].index: tuple(records) for records in later}
        return [made[index] for index in indices]

    async def _alone(self, prompt: Prompt, index: int, version: int | None, slots: Slots) -> tuple[Sample, ...] | None:
        if self.partial is not None and (finished := self.partial.finished(prompt, index, version)) is not None:
            return finished
        async with slots.hold():
            try:
                records = await self._finish(prompt, index, version)
            except SampleCutError:
                return None
        if self.partial is not None:
            self.partial.finish(prompt, index, records)
        return records

    async def _finish(
        self, prompt: Prompt, index: int, version: int | None, begun: list[Generation] | None = None
    ) -> tuple[Sample, ...]:
        """Return the scored records of one trajectory, from nothing or from what was begun of it."""
        with noting(f"sample {index} of group {prompt.group_id}"):
            made: Sample | Sequence[Sample]
            if begun is None:
                made = await self._generate(self, prompt, index, version)
            else:
                made = await go_on(self, prompt, index, version, begun)
            return await self._score((made,) if isinstance(made, Sample) else tuple(made))

    async def _score_together(self, prompt: Prompt, responses: Mapping[int, list[Generation]]) -> list[Sample]:
        """Return the scored samples of whole responses, by index: without a task for each where the reward can."""
        samples = assemble(self, prompt, responses)
        if not isinstance(self.reward, WorkerReward):
            return await all_of(map(self._score_alone, samples))
        scores = zip(samples, await self.reward.score_together(samples), strict=True)
        return [sample.scored(score.value, score.reason, reward_s=seconds) for sample, (score, seconds) in scores]

    async def _score_alone(self, sample: Sample) -> Sample:
        with noting(name_of(sample)):
            (scored,) = await self._score((sample,))
        return scored

    async def _score(self, records: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """Score the last record of a trajectory, and give all of them its score."""
        began = time.monotonic()
        score = await self.reward.score(records[-1])
        seconds = time.monotonic() - began
        return tuple(record.scored(score.value, score.reason, reward_s=seconds) for record in records)

    def seed_of(self, prompt: Prompt, index: int, turn: int = 0) -> int:
        """Return the seed of one request: a hash of (run seed, group id, turn), plus the sample's index."""
        text = f"{self.config.seed}/{prompt.group_id}/{turn}"
        base = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _SEED_BITS)
        return base + index
