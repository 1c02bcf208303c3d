"""The lag rule of the asynchronous pipeline, as arithmetic.

Let B be the groups of one step, L the largest lag that may be trained on, t the version of the weights that the next
batch will train (the trainer's), and e the version that the engines serve. While a batch is being trained e = t - 1,
otherwise e = t. Groups are trained in the order of their prompts, B at a time. A prompt that is begun as number r
(from 0) among those waiting is trained by weights of version ``t + r // B``, and its oldest token is at least as new as
e, so its lag is at most ``t + r // B - e``. It may be begun when that is at most L::

    r < B * (L + 1 - (t - e))

So nothing that is begun under this rule can become too old, however long its generation takes: no work is thrown away
to keep the promise. With L = 0 generation and training alternate; with L = 1 a whole batch is made during training.
"""

from __future__ import annotations


def admissible(
    *, batch: int, max_lag: int, next_version: int, engine_version: int, waiting: int, capacity: int | None = None
) -> int:
    """Return how many prompts may be begun now.

    Args:
        batch: B, groups of one step.
        max_lag: L, versions.
        next_version: t, version of the weights that the next batch will train.
        engine_version: e, version that the engines serve; t or t - 1.
        waiting: Groups begun and not yet taken for training.
        capacity: Most groups that may wait, at least B; None bounds them by the lag alone.

    Returns:
        At least 0.
    """
    most = batch * (max_lag + 1 - (next_version - engine_version))
    return max(0, (most if capacity is None else min(most, capacity)) - waiting)
