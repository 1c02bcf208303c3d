"""Running micro-batches: Megatron's schedule outside, this package's logprobs and the injected loss inside.

One :class:`Forward` serves training and scoring. The schedule calls it once per micro-batch with the wrapped model; on
the last pipeline stage it then calls back with the hidden states. For training the answer is the loss (a sum, see
:data:`~vime_megatron.TokenLoss`) and a dict of sums; for scoring it is the log-probabilities by sequence.

An idle row (a rank that has fewer micro-batches than others) goes through the model, because the ranks communicate
inside it, and adds an exact zero. So does every row after one whose loss has raised: what it raised is kept until the
schedule is through, since ranks that left it would leave the others waiting.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime_megatron.batch import TokenLoss
from vime_megatron.errors import BatchError, TrainerError
from vime_megatron.logprobs import VocabShard, token_logprobs
from vime_megatron.microbatch import MicroBatch
from vime_megatron.model.context import gather_predictions
from vime_megatron.model.policy import PolicyModel

Finish = Callable[..., Any]


class Forward:
    """Forward and backward passes of one rank.

    Args:
        model: This rank's part of the model.
        wrapped: The same, as wrapped for data parallelism.
        shard: This rank's rows of the vocabulary.
        temperature: Divides the logits.
        max_tokens: Budget of a micro-batch.
        context: Context-parallel group; ``None`` when rows are whole.
    """

    def __init__(
        self,
        model: PolicyModel,
        wrapped: Any,
        *,
        shard: VocabShard,
        temperature: float,
        max_tokens: int,
        context: Any = None,
    ) -> None:
        """Keep the parts; nothing runs yet."""
        self._model = model
        self._wrapped = wrapped
        self._shard = shard
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._context = context
        self._failure: Exception | None = None
        model.config.finalize_model_grads_func = _finalize_sums

    def train(
        self, batches: Iterator[MicroBatch], count: int, loss: TokenLoss, *, scale: float = 1.0
    ) -> tuple[list[dict[str, Tensor]], Exception | None]:
        """Accumulate gradients over the micro-batches and reduce them over the ranks.

        Args:
            batches: This rank's micro-batches.
            count: Their number, the same on every rank.
            loss: The injected loss.
            scale: What the loss is multiplied by on its way back, and all gradients with it; not in what is returned.

        Returns:
            The sums of each micro-batch, ``loss`` among them; empty off the last pipeline stage. And what the loss
            raised on this rank, if it did: then the gradients stand for nothing (:func:`check_loss`).
        """
        self._failure = None
        # Megatron calls it where a backward pass starts from a loss, which is on the last pipeline stage only.
        self._model.config.grad_scale_func = None if scale == 1.0 else partial(operator.mul, scale)
        try:
            return self._run(batches, count, partial(self._training_loss, loss), training=True), self._failure
        finally:
            self._failure = None  # it holds the step's tensors

    def score(self, batches: Iterator[MicroBatch], count: int) -> list[dict[int, Tensor]]:
        """Return log-probabilities by global index, per micro-batch; empty off the last pipeline stage."""
        with torch.no_grad():
            return self._run(batches, count, self._scores, training=False)

    def _run(self, batches: Iterator[MicroBatch], count: int, finish: Finish, *, training: bool) -> list[Any]:
        collected: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, finish),
            data_iterator=batches,
            model=[self._wrapped],
            num_microbatches=count,
            seq_length=self._max_tokens,
            micro_batch_size=1,
            forward_only=not training,
            collect_non_loss_data=not training,
        )
        return collected

    def _forward(self, finish: Finish, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Finish]:
        batch = next(batches)
        hidden_s1m = model(batch.row.tokens_1t, None, None, packed_seq_params=batch.row)
        return hidden_s1m, partial(finish, batch)

    def _logprobs(self, hidden_s1m: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Project the predicting positions onto the vocabulary, over the tensor- and context-parallel ranks."""
        if self._model.config.sequence_parallel:
            hidden_s1m = tensor_parallel.gather_from_sequence_parallel_region(hidden_s1m)
        elif self._shard.group is not None:
            hidden_s1m = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_s1m)
        logprobs_c, entropy_c = token_logprobs(
            hidden_s1m[:, 0][batch.sources_c],
            self._model.output_weight(),
            batch.targets_c,
            temperature=self._temperature,
            shard=self._shard,
        )
        if self._context is None:
            return logprobs_c, entropy_c
        logprobs_k, entropy_k = (
            gather_predictions(values_c, batch.shares, self._context) for values_c in (logprobs_c, entropy_c)
        )
        return logprobs_k, entropy_k

    def _training_loss(
        self, loss: TokenLoss, batch: MicroBatch, hidden_s1m: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs_k, entropy_k = self._logprobs(hidden_s1m, batch)
        tokens = torch.tensor(sum(batch.shares), dtype=torch.int)
        if not batch.idle and self._failure is None:
            try:
                value, sums = loss(logprobs_k, entropy_k, batch.fields_k)
                value = _checked(value, sums, logprobs_k)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is raised once no rank waits for this one
                self._failure = error
            else:
                return value, tokens, {"loss": value.detach(), **{name: total.detach() for name, total in sums.items()}}
        return (logprobs_k.sum() + hidden_s1m.sum()) * 0.0, tokens, {}

    def _scores(self, batch: MicroBatch, hidden_s1m: Tensor, *, non_loss_data: bool = True) -> dict[int, Tensor]:
        logprobs_k, _entropy_k = self._logprobs(hidden_s1m, batch)
        flat_k = torch.cat((logprobs_k.new_zeros(1), logprobs_k)).cpu()
        scores = {}
        for index, (start, stop) in zip(batch.sequences, batch.spans, strict=True):
            values = flat_k[start : stop + 1].clone()
            values[0] = 0.0
            scores[index] = values
        return scores


def check_loss(failure: Exception | None, problems: Sequence[str]) -> None:
    """Raise on every rank what the loss raised on any.

    Args:
        failure: From :meth:`Forward.train`.
        problems: The same of each rank as text, in rank order; empty where all went well.

    Raises:
        Exception: The failure itself, on its own rank.
        TrainerError: The loss has failed on other ranks only; says which, and why.
    """
    if failure is not None:
        raise failure
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        raise TrainerError(
            "the loss has failed on another rank",
            where=f"rank {', '.join(map(str, failed))} of {len(problems)}",
            seen=next(iter(failed.values())),
            fix="weights and optimiser are unchanged: mend the loss, or drop the batch",
        )


def _checked(value: Any, sums: Any, logprobs_k: Tensor) -> Tensor:
    """Refuse what a loss must not return, before it is lost in a total; return the loss."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BatchError("the loss is not a scalar", seen=seen, expected="a sum over tokens, as a tensor")
    wrong = [name for name, total in sums.items() if not isinstance(total, Tensor) or total.numel() != 1]
    wrong += ["loss"] * ("loss" in sums)
    if wrong:
        raise BatchError(
            "the loss's metrics cannot be added up",
            where=", ".join(map(repr, wrong)),
            expected="tensors of one value each, under names other than 'loss'",
        )
    if value.requires_grad:
        return value
    if logprobs_k.numel():  # Megatron would leave the backward pass out, and nothing would be learnt
        raise BatchError(
            "the loss has no gradient",
            seen="a tensor that does not depend on the log-probabilities",
            expected="a sum that does; .detach() and torch.no_grad() cut it off",
        )
    return value + logprobs_k.sum()  # of no tokens: other ranks wait for this one's backward pass


def _finalize_sums(model: list[Any], _tokens: Tensor | None = None, **groups: Any) -> None:
    """Let Megatron reduce gradients without dividing them by a number of tokens: the loss is normalised already."""
    finalize_model_grads(model, None, **groups)
