"""Prompts to scored groups: generate n samples of each prompt, score each when it is done, hand on whole groups.

Repeatability. The seed of a sample is a hash of (run seed, group id, sample index), so it depends neither on the order
in which requests are sent, nor on the engine that serves them, nor on how many there are; a run with the same data,
seeds and weights samples the same tokens.

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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vime_rollout.engine.remote import Engine
from vime_rollout.engine.request import SamplingParams
from vime_rollout.errors import EngineTimeoutError, RolloutError, SampleCutError
from vime_rollout.partial import PartialSamples
from vime_rollout.rewards.base import Reward
from vime_rollout.sample import Prompt, Sample, SampleGroup
from vime_rollout.single_turn import single_turn
from vime_rollout.tokens import Encoder


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
    sticky_groups: bool = False
    max_turns: int = 1


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
        slots = asyncio.Semaphore(self.config.concurrency)
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

    async def group(
        self, prompt: Prompt, *, version: int | None = None, slots: asyncio.Semaphore | None = None
    ) -> SampleGroup:
        """Return the scored group of one prompt.

        Args:
            prompt: The prompt.
            version: As for ``run``.
            slots: Shared bound on samples in work; ``None`` makes one of the configured size.

        Raises:
            RolloutError: The first error of any sample, with a note that names it.
            SampleCutError: When partial samples are kept and the group was cut; what there is of it is kept.
        """
        slots = slots or asyncio.Semaphore(self.config.concurrency)
        prompt = self.encoder.encode(prompt)
        count = self.config.samples_per_prompt
        tasks = [asyncio.create_task(self._sample(prompt, index, version, slots)) for index in range(count)]
        try:
            records = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        samples = [sample for trajectory in records if trajectory is not None for sample in trajectory]
        if None in records:
            raise SampleCutError(
                "group was cut", where=f"group {prompt.group_id}", seen=f"{len(samples)} of {count} done"
            )
        if self.partial is not None:
            self.partial.forget(prompt)
        return SampleGroup(prompt, tuple(samples))

    async def _sample(
        self, prompt: Prompt, index: int, version: int | None, slots: asyncio.Semaphore
    ) -> tuple[Sample, ...] | None:
        """Return the scored records of one trajectory, or ``None`` when it was cut to be gone on with later."""
        if self.partial is not None and (finished := self.partial.finished(prompt, index, version)) is not None:
            return finished
        async with slots:
            try:
                made = await self._generate(self, prompt, index, version)
                records = await self._score((made,) if isinstance(made, Sample) else tuple(made))
            except SampleCutError:
                return None
            except RolloutError as error:
                error.add_note(f"sample {index} of group {prompt.group_id}")
                raise
        if self.partial is not None:
            self.partial.finish(prompt, index, records)
        return records

    async def _score(self, records: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """Score the last record of a trajectory, and give all of them its score."""
        began = time.monotonic()
        score = await self.reward.score(records[-1])
        seconds = time.monotonic() - began
        return tuple(record.scored(score.value, score.reason, reward_s=seconds) for record in records)

    def seed_of(self, prompt: Prompt, index: int, turn: int = 0) -> int:
        """Return the seed of one request: 63 bits of a hash of (run seed, group id, sample index, turn)."""
        text = f"{self.config.seed}/{prompt.group_id}/{index}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
