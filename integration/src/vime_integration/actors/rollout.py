"""The rollout: an asyncio actor that draws prompts, has engines answer them, scores, and makes the training rows.

It talks to the engines directly. What it hands on are two things: a small report with metrics for the driver, and a
reference to the rows in Ray's object store, which the trainer ranks read without the driver touching them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from vime_grpo import BatchRows, RunConfig, SampleRecord, batch_metrics, evaluation_metrics
from vime_rollout import (
    DataSource,
    Encoder,
    GenerateFunction,
    GroupFilter,
    Prompt,
    Reward,
    Rollout,
    SampleGroup,
    evaluate,
    evaluation_prompts,
    load_filter,
    load_generate,
    load_reward,
    load_source,
    open_data_source,
    rollout_metrics,
    zero_reasons,
)
from vime_rollout.experimental import PartialSamples

from vime_integration.actors.engine import EngineAddress
from vime_integration.actors.reach import Reach
from vime_integration.batches import make_batch
from vime_integration.cluster import log_to_file
from vime_integration.collector import StepCollector
from vime_integration.errors import PipelineError
from vime_integration.garbage import set_apart
from vime_integration.ledger import LedgerEntry
from vime_integration.reading import records_of
from vime_integration.translate import (
    data_config,
    evaluation_data_config,
    evaluation_sampling,
    rollout_config,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutReport:
    """One rollout, as the driver sees it.

    Attributes:
        batch: Reference to the ``RolloutBatch`` in the object store.
        metrics: Metrics by name.
        why_zero: The most frequent reasons of a reward of 0, with their counts.
        samples: The best and the worst samples as text, for a person to read.
        ledger: What became of prompts since the last rollout.
        spans: For the timeline: lane, phase, begin and end by ``time.monotonic``, where the driver cannot tell.
    """

    batch: Any
    metrics: dict[str, float]
    why_zero: list[tuple[str, int]]
    samples: list[SampleRecord]
    ledger: LedgerEntry
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)


class RolloutActor:
    """Owns the data source, the reward and the connections to the engines.

    Args:
        config: The run's configuration.
        log: This process's log file.
    """

    #: Whether generation goes on by itself, and is not asked for step by step.
    _streams = False

    def __init__(self, config: RunConfig, log: Path) -> None:
        """Keep the configuration; ``start`` loads tokenizer, data and reward."""
        log_to_file(log)
        self._config = config
        # Asked step by step, all tokens are of the step's weights, unless a step goes on from what the last one cut.
        self._max_lag = config.pipeline.max_weight_lag if self._streams or config.rollout.partial else 0
        self._source: DataSource | None = None
        self._keep: GroupFilter = load_filter("all")
        self._generate: GenerateFunction | None = None
        self._collector: StepCollector | None = None
        self._questions: list[Prompt] = []
        self._encoder: Encoder | None = None
        self._reward: Reward | None = None
        self._rollout: Rollout | None = None
        self._reach = Reach(config, log.with_name("router.log"))

    async def start(self) -> None:
        """Load the tokenizer, open the data and the reward.

        Raises:
            RolloutError: The data, the tokenizer, the reward or other code of one's own cannot be used.
        """
        config = self._config
        self._encoder = Encoder(config.model.path)
        if config.data.kind == "custom":
            self._source = load_source(config.data.source or "", config.data.options, encoder=self._encoder)
        else:
            self._source = open_data_source(data_config(config), self._encoder)
        name = config.reward.name or config.reward.path or ""
        self._reward = load_reward(name, timeout_s=config.reward.timeout_s, options=config.reward.options)
        own = config.rollout
        self._keep = load_filter(own.filter or "all", own.filter_options)
        self._generate = load_generate(own.generate, own.generate_options) if own.generate else None

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to the engines.

        Raises:
            EngineError: One does not answer.
        """
        if self._encoder is None or self._reward is None or self._source is None:
            raise PipelineError("the rollout was connected before it was started", fix="call start() first")
        config = self._config.rollout
        await self._reach.connect(addresses)
        self._rollout = Rollout(
            self._reach.front,
            self._encoder,
            self._reward,
            rollout_config(self._config),
            generate=self._generate,
            partial=PartialSamples(max_lag=self._max_lag) if config.partial and not self._streams else None,
        )
        self._collector = StepCollector(
            self._rollout, self._source, batch=config.batch_size, ahead=config.over_sample, keep=self._keep
        )
        set_apart()

    async def lost(self) -> dict[str, str]:
        """Return the engines that failed a request and are left out, with the reason of each."""
        return self._reach.lost()

    async def engine_lost(self, name: str) -> None:
        """Leave an engine out: what it has in flight is sent elsewhere, or waits for its return."""
        await self._reach.let_go(name)

    async def engine_back(self, address: EngineAddress, version: int) -> None:
        """Take an engine back that was started again and serves ``version``, as the others do.

        Raises:
            EngineError: It does not answer, or serves another version.
        """
        await self._reach.take_back(address, version)

    async def sleep(self) -> None:
        """Let every engine give its device memory back.

        Raises:
            EngineError: One did not.
        """
        await self._reach.sleep()

    async def wake(self, tag: str) -> None:
        """Let every engine take back one part of its device memory: "weights" or "kv_cache".

        Raises:
            EngineError: One did not.
        """
        await self._reach.wake(tag)

    async def pids(self) -> list[int]:
        """Return this process's id and those of the reward's workers."""
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    async def collect(self, version: int) -> RolloutReport:
        """Make the rollout of one step.

        Args:
            version: The weight version that every token must come from.

        Raises:
            RolloutError: Generation or scoring failed.
            PipelineError: A sample is not what was asked for.
        """
        assert self._collector is not None
        began = time.monotonic()
        collected = await self._collector.collect(version)
        report = self._report(collected.groups, version, time.monotonic() - began, collected.ledger)
        report.metrics.update(collected.metrics)
        return report

    def _report(self, groups: list[SampleGroup], version: int, seconds: float, ledger: LedgerEntry) -> RolloutReport:
        """Put the batch of these groups into the object store and say what it is."""
        config = self._config
        samples = [sample for group in groups for sample in group]
        batch = make_batch(samples, config, version, max_lag=self._max_lag)
        devices = self._reach.count * config.engine.tensor_parallel
        metrics = rollout_metrics(groups, seconds=seconds, devices=devices)
        metrics |= batch_metrics(BatchRows.join(batch.updates))
        metrics["rollout/epoch"] = float(max(group.prompt.epoch for group in groups))
        metrics["rollout/samples"] = float(len(samples))
        records = records_of(samples, {g.prompt.group_id: g.prompt for g in groups}, config.tracking.samples)
        logger.info("version %d: %d samples in %.2f s", version, len(samples), seconds)
        return RolloutReport(ray.put(batch), metrics, zero_reasons(groups), records, ledger)

    async def evaluate(self, version: int) -> dict[str, float]:
        """Answer and score the evaluation's prompts, which are never trained on.

        Args:
            version: What the engines serve; every token must come from it.

        Returns:
            ``eval/*``.

        Raises:
            RolloutError: Generation or scoring failed.
        """
        assert self._rollout is not None
        section, sampling = self._config.evaluation, evaluation_sampling(self._config)
        if not self._questions:
            self._questions = self._evaluation_questions()
        groups = await evaluate(
            self._rollout,
            self._questions,
            samples_per_prompt=section.samples_per_prompt,
            sampling=sampling,
            version=version,
        )
        rewards = {group.prompt.group_id: group.rewards for group in groups}
        return evaluation_metrics(rewards, pass_k=section.pass_k, solved_at=section.solved_at)

    def _evaluation_questions(self) -> list[Prompt]:
        section = self._config.evaluation
        if section.kind != "custom":
            return evaluation_prompts(evaluation_data_config(self._config), self._encoder)
        if section.size is None:
            raise PipelineError("an evaluation source of one's own needs evaluation.size", expected="how many prompts")
        return load_source(section.source or "", section.options, encoder=self._encoder).next(section.size)

    async def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and what was drawn from it and not used, as JSON values."""
        assert self._collector is not None
        return self._collector.state_dict()

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: It belongs to other data.
        """
        assert self._collector is not None
        self._collector.load_state_dict(state)

    async def stop(self) -> None:
        """End the reward's worker processes and close the connections."""
        if self._reward is not None:
            self._reward.close()
        await self._reach.stop()
