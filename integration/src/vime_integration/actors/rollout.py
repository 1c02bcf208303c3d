"""The rollout: an asyncio actor that draws prompts, has engines answer them, scores, and makes the training rows.

It talks to the engines directly. What it hands on are two things: a small report with metrics for the driver, and a
reference to the rows in Ray's object store, which the trainer ranks read without the driver touching them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
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
    Sample,
    SampleGroup,
    SamplingParams,
    load_reward,
    open_data_source,
    rollout_metrics,
    zero_reasons,
)
from vime_rollout.errors import EngineDeadError
from vime_rollout.experimental import GroupFilter, differing_rewards

from vime_integration.actors.engine import EngineAddress
from vime_integration.batches import make_batch
from vime_integration.cluster import log_to_file
from vime_integration.errors import PipelineError
from vime_integration.ledger import LedgerEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutReport:
    """One rollout, as the driver sees it.

    Attributes:
        batch: Reference to the ``RolloutBatch`` in the object store.
        metrics: Metrics by name.
        why_zero: The most frequent reasons of a reward of 0, with their counts.
        samples: The best and the worst samples, for a person to read.
        ledger: What became of prompts since the last rollout.
    """

    batch: Any
    metrics: dict[str, float]
    why_zero: list[tuple[str, int]]
    samples: list[dict[str, Any]]
    ledger: LedgerEntry


class RolloutActor:
    """Owns the data source, the reward and the connections to the engines.

    Args:
        config: The run's configuration.
        log: This process's log file.
    """

    #: Largest lag of a token that is trained on.
    _max_lag = 0

    def __init__(self, config: RunConfig, log: Path) -> None:
        """Keep the configuration; ``start`` loads tokenizer, data and reward."""
        log_to_file(log)
        self._config = config
        self._source: EpochSource | None = None
        self._encoder: Encoder | None = None
        self._reward: Reward | None = None
        self._rollout: Rollout | None = None
        self._engines: dict[str, RemoteEngine] = {}
        self._pool: EnginePool | None = None

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
            self._engines[address.name] = engine
        if self._encoder is None or self._reward is None:
            raise PipelineError("the rollout was connected before it was started", fix="call start() first")
        section = self._config.engine
        self._pool = EnginePool(
            list(self._engines.values()),
            on_loss="wait" if section.restarts and not section.urls else "raise",
            return_deadline_s=section.start_deadline_s + self._config.sync.deadline_s,
            max_losses=section.restarts + 1,
        )
        self._rollout = Rollout(self._pool, self._encoder, self._reward, rollout_config(self._config))

    async def lost(self) -> dict[str, str]:
        """Return the engines that failed a request and are left out, with the reason of each."""
        return {} if self._pool is None else {name: str(error) for name, error in self._pool.lost.items()}

    async def engine_lost(self, name: str) -> None:
        """Leave an engine out: what it has in flight is sent elsewhere, or waits for its return."""
        assert self._pool is not None
        await self._pool.lose(name, EngineDeadError("engine is being started again", where=f"engine {name}"))

    async def engine_back(self, address: EngineAddress) -> None:
        """Take an engine back that was started again and has the weights of the others.

        Raises:
            EngineError: It does not answer.
        """
        assert self._pool is not None
        await self._engines[address.name].reconnect(address.url)
        self._pool.readmit(address.name)

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
        assert self._rollout is not None
        assert self._source is not None
        began = time.monotonic()
        groups = await self._rollout.run(self._source.next(self._config.rollout.batch_size), version=version)
        seconds = time.monotonic() - began
        return self._report(groups, version, seconds, LedgerEntry([group.prompt.position for group in groups]))

    def _report(self, groups: list[SampleGroup], version: int, seconds: float, ledger: LedgerEntry) -> RolloutReport:
        """Put the batch of these groups into the object store and say what it is."""
        assert self._source is not None
        config = self._config
        samples = [sample for group in groups for sample in group]
        batch = make_batch(samples, config, version, max_lag=self._max_lag)
        devices = len(self._engines) * config.engine.tensor_parallel
        metrics = rollout_metrics(groups, seconds=seconds, devices=devices)
        metrics |= batch_metrics([row for rows in batch.updates for row in rows])
        metrics["rollout/epoch"] = float(self._source.epoch)
        metrics["rollout/samples"] = float(len(samples))
        logger.info("version %d: %d samples in %.2f s", version, len(samples), seconds)
        return RolloutReport(ray.put(batch), metrics, zero_reasons(groups), _examples(samples), ledger)

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
        for engine in self._engines.values():
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


def group_filter(config: RunConfig) -> GroupFilter | None:
    """Return what decides about a group before it is trained on, or None when every group is.

    Raises:
        PipelineError: There is no such filter.
    """
    name = config.rollout.filter
    if name not in (None, "differing_rewards"):
        raise PipelineError("no such filter", where="rollout.filter", seen=name, expected="differing_rewards")
    return None if name is None else differing_rewards


def _examples(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the best and the worst sample as JSON values without their token lists."""
    best = max(samples, key=lambda sample: sample.reward or 0.0)
    worst = min(samples, key=lambda sample: sample.reward or 0.0)
    return [
        {
            "kind": kind,
            "prompt": sample.prompt_id,
            "index": sample.index,
            "response": sample.response,
            "label": sample.label,
            "reward": sample.reward,
            "reason": sample.reward_reason,
            "tokens": sample.response_length,
            "versions": [[span.version, span.start, span.end] for span in sample.versions],
        }
        for kind, sample in (("best", best), ("worst", worst))
    ]
