"""The rollout: an asyncio actor that draws prompts, has engines answer them, scores, and makes the training rows.

It talks to the engines directly. What it hands on are two things: a small report with metrics for the driver, and a
reference to the rows in Ray's object store, which the trainer ranks read without the driver touching them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from vime_grpo import RunConfig, batch_metrics
from vime_rollout import (
    DataConfig,
    Encoder,
    EngineClient,
    EnginePool,
    EpochSource,
    RemoteEngine,
    Reward,
    Rollout,
    RolloutConfig,
    RowKeys,
    SampleGroup,
    SamplingParams,
    load_reward,
    open_data_source,
    rollout_metrics,
    zero_reasons,
)

from vime_integration.actors.engine import EngineAddress
from vime_integration.batches import make_batch
from vime_integration.cluster import log_to_file
from vime_integration.errors import PipelineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutReport:
    """One rollout, as the driver sees it.

    Attributes:
        batch: Reference to the ``RolloutBatch`` in the object store.
        metrics: Metrics by name.
        why_zero: The most frequent reasons of a reward of 0, with their counts.
        example: The best and the worst response, as text, for a person to read.
    """

    batch: Any
    metrics: dict[str, float]
    why_zero: list[tuple[str, int]]
    example: dict[str, str]


class RolloutActor:
    """Owns the data source, the reward and the connections to the engines.

    Args:
        config: The run's configuration.
        log: This process's log file.
    """

    def __init__(self, config: RunConfig, log: Path) -> None:
        """Keep the configuration; ``start`` loads tokenizer, data and reward."""
        log_to_file(log)
        self._config = config
        self._source: EpochSource | None = None
        self._encoder: Encoder | None = None
        self._reward: Reward | None = None
        self._rollout: Rollout | None = None
        self._engines: list[RemoteEngine] = []

    async def start(self) -> int:
        """Load the tokenizer, open the data and the reward.

        Returns:
            Number of prompts of one epoch.

        Raises:
            RolloutError: The data, the tokenizer or the reward cannot be used.
        """
        config = self._config
        self._encoder = Encoder(config.model.path)
        self._source = open_data_source(data_config(config), self._encoder)
        name = config.reward.name or config.reward.path or ""
        self._reward = load_reward(name, timeout_s=config.reward.timeout_s, options=config.reward.options)
        return len(self._source)

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to the engines.

        Raises:
            EngineError: One does not answer.
        """
        config = self._config.rollout
        for address in addresses:
            client = EngineClient(
                address.url,
                name=address.name,
                max_concurrency=config.concurrency,
                request_deadline_s=config.request_deadline_s,
                retries=config.retries,
            )
            engine = RemoteEngine(address.url, name=address.name, client=client)
            await engine.connect()
            self._engines.append(engine)
        source_parts = (self._encoder, self._reward)
        if self._encoder is None or self._reward is None:
            raise PipelineError("the rollout was connected before it was started", seen=repr(source_parts))
        engines = self._engines[0] if len(self._engines) == 1 else EnginePool(self._engines)
        self._rollout = Rollout(engines, self._encoder, self._reward, rollout_config(self._config))

    async def collect(self, version: int) -> RolloutReport:
        """Make the rollout of one step.

        Args:
            version: The weight version that every token must come from.

        Raises:
            RolloutError: Generation or scoring failed.
            PipelineError: A sample is not what was asked for.
        """
        assert self._rollout is not None
        assert self._source is not None
        began = time.monotonic()
        groups = await self._rollout.run(self._source.next(self._config.rollout.batch_size), version=version)
        seconds = time.monotonic() - began
        samples = [sample for group in groups for sample in group]
        batch = make_batch(samples, self._config, version)
        devices = self._config.engine.count * self._config.engine.tensor_parallel
        metrics = rollout_metrics(groups, seconds=seconds, devices=devices)
        metrics |= batch_metrics([row for rows in batch.updates for row in rows])
        metrics["rollout/epoch"] = float(self._source.epoch)
        logger.info("version %d: %d samples in %.2f s", version, len(samples), seconds)
        return RolloutReport(ray.put(batch), metrics, zero_reasons(groups), _example(groups))

    async def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, JSON values."""
        assert self._source is not None
        return self._source.state_dict()

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position in the data.

        Raises:
            StateError: It belongs to other data.
        """
        assert self._source is not None
        self._source.load_state_dict(state)

    async def stop(self) -> None:
        """End the reward's worker processes and close the connections."""
        if self._reward is not None:
            self._reward.close()
        for engine in self._engines:
            await engine.stop()


def data_config(config: RunConfig) -> DataConfig:
    """Translate the run's configuration into the data source's own."""
    data, rollout = config.data, config.rollout
    gym = data.kind == "reasoning_gym"
    return DataConfig(
        path=None if gym else str(data.path),
        keys=RowKeys(prompt=data.prompt_key, label=data.label_key, metadata=data.metadata_key),
        gym_task=data.task if gym else None,
        gym_seed=data.seed,
        gym_size=data.size or 1,
        gym_options=data.task_config,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        shuffle=data.shuffle,
        seed=data.seed,
        max_prompt_tokens=rollout.max_context_tokens - rollout.max_response_tokens,
        overlong=data.overlong,
    )


def rollout_config(config: RunConfig) -> RolloutConfig:
    """Translate the run's configuration into the rollout's own."""
    section = config.rollout
    return RolloutConfig(
        samples_per_prompt=section.samples_per_prompt,
        sampling=SamplingParams(
            max_tokens=section.max_response_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop=section.stop,
            stop_token_ids=section.stop_token_ids,
        ),
        max_context_tokens=section.max_context_tokens,
        seed=section.seed,
        concurrency=section.concurrency,
        step_deadline_s=step_deadline(config),
        request_deadline_s=section.request_deadline_s,
    )


def step_deadline(config: RunConfig) -> float:
    """Return the seconds that one rollout may take: every wave of requests at its own deadline, and one to spare."""
    section = config.rollout
    waves = -(-section.batch_size * section.samples_per_prompt // section.concurrency)
    return (waves + 1) * section.request_deadline_s + config.reward.timeout_s


def _example(groups: Sequence[SampleGroup]) -> dict[str, str]:
    samples = [sample for group in groups for sample in group]
    best = max(samples, key=lambda sample: sample.reward or 0.0)
    worst = min(samples, key=lambda sample: sample.reward or 0.0)
    return {
        "best": f"{best.response!r} (label {best.label!r}, reward {best.reward})",
        "worst": f"{worst.response!r} (label {worst.label!r}, reward {worst.reward}: {worst.reward_reason})",
    }
