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
from dataclasses import dataclass, replace
from typing import Protocol

from vime_rollout.engine.remote import Engine
from vime_rollout.engine.request import GenerateRequest, Generation, SamplingParams
from vime_rollout.errors import EngineTimeoutError, RolloutError
from vime_rollout.rewards.base import Reward
from vime_rollout.sample import Prompt, Sample, SampleGroup, SampleStatus, Timings, VersionSpan
from vime_rollout.tokens import Encoder

_MAX_CONTINUATIONS = 64


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
    """

    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        reward: Reward,
        config: RolloutConfig,
        *,
        generate: GenerateFunction | None = None,
    ) -> None:
        """Keep the parts; they are started and stopped by their owners."""
        self.engine = engine
        self.encoder = encoder
        self.reward = reward
        self.config = config
        self._generate = generate or single_turn

    def with_config(self, config: RolloutConfig) -> Rollout:
        """Return a rollout of the same parts with another configuration."""
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
        return SampleGroup(prompt, tuple(sample for trajectory in records for sample in trajectory))

    async def _sample(
        self, prompt: Prompt, index: int, version: int | None, slots: asyncio.Semaphore
    ) -> tuple[Sample, ...]:
        async with slots:
            try:
                made = await self._generate(self, prompt, index, version)
                samples = (made,) if isinstance(made, Sample) else tuple(made)
                began = time.monotonic()
                score = await self.reward.score(samples[-1])  # it stands for the trajectory
                seconds = time.monotonic() - began
                return tuple(s.scored(score.value, score.reason, reward_s=seconds) for s in samples)
            except RolloutError as error:
                error.add_note(f"sample {index} of group {prompt.group_id}")
                raise

    def seed_of(self, prompt: Prompt, index: int, turn: int = 0) -> int:
        """Return the seed of one request: 63 bits of a hash of (run seed, group id, sample index, turn)."""
        text = f"{self.config.seed}/{prompt.group_id}/{index}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


async def single_turn(rollout: Rollout, prompt: Prompt, index: int, version: int | None) -> Sample:
    """Make one sample of one response; continue it if it was cut from outside.

    Args:
        rollout: Engine, encoder and configuration.
        prompt: With tokens.
        index: Which sample of the group.
        version: Weights that every token must come from, or ``None``.

    Raises:
        RolloutError: When the prompt leaves no room for a response, or the sample is cut again and again.
        EngineError: From the engine.
    """
    config = rollout.config
    room = config.max_context_tokens - len(prompt.tokens)
    if room < 1:
        raise RolloutError(
            "prompt leaves no room for a response",
            where=f"prompt {prompt.id}",
            seen=f"{len(prompt.tokens)} tokens",
            expected=f"fewer than max_context_tokens = {config.max_context_tokens}",
            fix="set max_prompt_tokens of the data source",
        )
    budget = min(room, config.sampling.max_tokens)
    parts: list[Generation] = []
    for turn in range(_MAX_CONTINUATIONS):
        so_far = tuple(token for part in parts for token in part.tokens)
        sampling = replace(
            config.sampling,
            max_tokens=budget - len(so_far),
            min_tokens=max(0, min(config.sampling.min_tokens, budget) - len(so_far)),
        )
        request = GenerateRequest(
            tokens=prompt.tokens + so_far,
            sampling=sampling,
            seed=rollout.seed_of(prompt, index, turn),
            request_id=f"{prompt.group_id}-{index}-{turn}",
            session_id=prompt.group_id if config.sticky_groups else "",
        )
        parts.append(await rollout.engine.generate(request, version=version, deadline_s=config.request_deadline_s))
        if parts[-1].status is not SampleStatus.ABORTED or len(so_far) + len(parts[-1].tokens) >= budget:
            return assemble(rollout, prompt, index, parts)
    raise RolloutError(
        "sample is cut again and again",
        where=f"sample {index} of group {prompt.group_id}",
        seen=f"{len(parts)} parts, {sum(len(part.tokens) for part in parts)} of {budget} tokens",
        fix="pause with mode keep or wait instead of abort, or abort less often",
    )


def assemble(rollout: Rollout, prompt: Prompt, index: int, parts: Sequence[Generation]) -> Sample:
    """Join the parts of one response into an unscored sample whose every response token is trained on.

    Args:
        rollout: For the decoder and the seed.
        prompt: With tokens.
        index: Which sample of the group.
        parts: At least one, in order; each continues the ones before.
    """
    response = tuple(token for part in parts for token in part.tokens)
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.versions:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                start = spans.pop().start
            spans.append(VersionSpan(span.version, start, end))
        offset += len(part.tokens)
    return Sample(
        prompt_id=prompt.id,
        group_id=prompt.group_id,
        index=index,
        tokens=prompt.tokens + response,
        prompt_length=len(prompt.tokens),
        loss_mask=(1,) * len(response),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(spans),
        status=parts[-1].status,
        response=rollout.encoder.decode(response),
        seed=rollout.seed_of(prompt, index),
        label=prompt.label,
        metadata=prompt.metadata,
        timings=Timings(
            queue_s=sum(p.queue_s for p in parts),
            generate_s=sum(p.seconds for p in parts),
            attempts=sum(p.attempts for p in parts),
            engine=parts[-1].engine,
        ),
    )
