"""The rollout of the asynchronous pipeline: the same actor, whose generation goes on by itself.

What `RolloutActor.collect` does when it is asked, a `Producer` does all the time; the driver takes batches and says
when weights have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_grpo import RunConfig

from vime_integration.actors.engine import EngineAddress
from vime_integration.actors.rollout import RolloutActor, RolloutReport
from vime_integration.producer import Producer
from vime_integration.staleness import lag_metrics
from vime_integration.translate import step_deadline


class StreamingRolloutActor(RolloutActor):
    """Owns the data source, the reward, the connections to the engines, and generation that goes on by itself.

    Args:
        config: The run's configuration.
        log: This process's log file.
    """

    _streams = True

    def __init__(self, config: RunConfig, log: Path) -> None:
        """Keep the configuration."""
        super().__init__(config, log)
        self._producer: Producer | None = None

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to the engines and make the producer; generation begins with ``begin``."""
        await super().connect(addresses)
        assert self._rollout is not None
        assert self._source is not None
        section, pipeline = self._config.rollout, self._config.pipeline
        self._producer = Producer(
            self._rollout,
            self._source,
            batch=section.batch_size,
            max_lag=pipeline.max_weight_lag,
            concurrency=section.concurrency,
            capacity=self._config.queue_groups,
            on_expired=pipeline.on_expired,
            keep=self._keep,
        )

    async def begin(self, version: int) -> None:
        """Begin to generate with engines that serve ``version``."""
        self._ready().start(version)

    async def weights_changed(self, version: int) -> None:
        """Note that every engine serves ``version`` now."""
        self._ready().weights_changed(version)

    async def take(self, version: int) -> RolloutReport:
        """Return the batch that weights of ``version`` train on; waits until it is complete.

        Raises:
            PipelineError: It was not complete in time.
            RolloutError: The first error of any sample.
        """
        taken = await self._ready().take(version, deadline_s=step_deadline(self._config))
        samples = [sample for group in taken.groups for sample in group]
        seconds = max(taken.waited_s, 1e-9)
        report = self._report(taken.groups, version, seconds, taken.ledger)
        # Tokens over the time that training waited would say nothing; the driver knows how long the step took.
        for name in [name for name in report.metrics if name.startswith("perf/")]:
            del report.metrics[name]
        report.metrics.update(taken.metrics | lag_metrics(samples, version))
        report.spans.extend(("rollout", "generate", *busy) for busy in taken.worked.busy)
        if taken.worked.made is not None:
            report.spans.append(("batch", "batch", *taken.worked.made))
        report.metrics["perf/wait_for_rollout_time"] = taken.waited_s
        report.metrics["perf/generation_idle_time"] = taken.worked.idle_s
        return report

    async def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and every prompt on its way, as JSON values."""
        return self._ready().state_dict()

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: It belongs to other data.
        """
        self._ready().load_state_dict(state)

    async def stop(self) -> None:
        """End generation, the reward's processes and the connections."""
        if self._producer is not None:
            await self._producer.stop()
        await super().stop()

    def _ready(self) -> Producer:
        assert self._producer is not None, "connect() comes first"
        return self._producer
