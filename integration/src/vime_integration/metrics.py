"""The metrics of one step, from what the phases report. Names are the field's where it has them."""

from __future__ import annotations

from collections.abc import Sequence

from vime_grpo import mean_metrics, train_metrics
from vime_megatron import StepMetrics
from vime_sync import SyncReport

from vime_integration.actors.trainer import TrainReport
from vime_integration.staleness import settle_on_policy

#: Mean absolute difference between trainer's and engine's log-probabilities of the sampled tokens, nats.
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def step_metrics(reports: Sequence[TrainReport], sync: SyncReport) -> dict[str, float]:
    """Return the training and sync metrics of one step.

    Args:
        reports: One a trainer rank, in rank order; they agree on everything but time and memory.
        sync: What the weight update did.

    Returns:
        ``train/*`` averaged over the rollout's updates; in float16 ``train/loss_scale`` of the last update too, and
        ``train/loss_scale_redos``, how often gradients of the rollout had to be computed again;
        ``perf/log_probs_time`` (making sequences and, besides the loss's own, log-probabilities),
        ``perf/actor_train_*``, ``sync/*`` and the largest resident memory of a trainer rank,
        ``perf/trainer_peak_rss_gib``.
    """
    updates = reports[0].updates
    seconds = sum(update.seconds for update in updates)
    prepared = sum(end - begin for _, phase, begin, end in reports[0].spans if phase == "logprobs")
    each = [train_metrics(u.metrics, loss=u.loss, grad_norm=u.grad_norm, lr=u.lr) for u in updates]
    trained = mean_metrics(each)
    # Later updates start from weights that have moved, which is no disagreement with the engine.
    trained[DIFFERENCE] = each[0][DIFFERENCE]
    return settle_on_policy(trained) | {
        "train/step": float(updates[-1].step),
        **_loss_scale(updates),
        "perf/log_probs_time": prepared,
        "perf/actor_train_time": seconds,
        "perf/actor_train_tok_per_s": sum(update.tokens for update in updates) / seconds,
        "perf/trainer_peak_rss_gib": max(report.peak_rss_gib for report in reports),
        **{f"memory/trainer_{name}": max(r.memory.get(name, 0.0) for r in reports) for name in reports[0].memory},
        "sync/version": float(sync.version),
        "sync/bytes": float(sync.bytes),
        **{f"sync/{name}_time": value for name, value in sync.phases.items()},
    }


def _loss_scale(updates: Sequence[StepMetrics]) -> dict[str, float]:
    """Return what a loss scale did; nothing where nothing is scaled."""
    scale = updates[-1].loss_scale
    if scale is None:
        return {}
    return {"train/loss_scale": scale, "train/loss_scale_redos": float(sum(update.redos for update in updates))}
