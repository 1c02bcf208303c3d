"""The built-in generate function: one response to one prompt, or several in one request.

A response that is cut from outside (``aborted``) is continued from its own tokens: what was sampled is never sampled
again, and keeps its logprobs and versions. With partial samples kept, the cut may outlast the step: generation stops
there, and the next step goes on from the same tokens with the weights of then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from vime_rollout.engine.request import GenerateRequest, Generation
from vime_rollout.errors import RolloutError
from vime_rollout.sample import Prompt, Sample, SampleStatus, Timings, VersionSpan

if TYPE_CHECKING:
    from vime_rollout.rollout import Rollout

_MAX_CONTINUATIONS = 64


async def single_turn(rollout: Rollout, prompt: Prompt, index: int, version: int | None) -> Sample:
    """Make one sample of one response; continue it if it was cut from outside.

    Args:
        rollout: Engine, encoder and configuration.
        prompt: With tokens.
        index: Which sample of the group.
        version: Weights that every token made here must come from, or ``None``.

    Raises:
        RolloutError: When the prompt leaves no room for a response, or the sample is cut again and again.
        SampleCutError: When partial samples are kept and the step wants no more of this one.
        EngineError: From the engine.
    """
    parts = [] if rollout.partial is None else rollout.partial.resume(prompt, index, version)
    return await go_on(rollout, prompt, index, version, parts)


async def begin_together(
    rollout: Rollout, prompt: Prompt, indices: range, version: int | None
) -> list[list[Generation]]:
    """Ask for several samples of a prompt in one request, and return the first part of each (none where it is empty).

    They are the parts that a request for each alone would bring, so ``go_on`` makes the samples of ``single_turn``.

    Args:
        rollout: Engine, encoder and configuration.
        prompt: With tokens.
        indices: Samples of the group, one after the other.
        version: Weights that every token must come from, or ``None``.

    Raises:
        RolloutError: When the prompt leaves no room for a response.
        EngineError: From the engine.
    """
    request = _request(rollout, prompt, indices[0], [], _budget(rollout, prompt))
    if len(indices) > 1:
        request = replace(request, request_id=f"{prompt.group_id}-{indices[0]}to{indices[-1]}-0")
    deadline_s = rollout.config.request_deadline_s
    answers = await rollout.engine.generate_many(request, len(indices), version=version, deadline_s=deadline_s)
    return [[part] if _holds(part) else [] for part in answers]


async def go_on(rollout: Rollout, prompt: Prompt, index: int, version: int | None, parts: list[Generation]) -> Sample:
    """Make a sample whose first parts are there; see ``single_turn``.

    Args:
        rollout: Engine, encoder and configuration.
        prompt: With tokens.
        index: Which sample of the group.
        version: Weights that every token made here must come from, or ``None``.
        parts: What there is of it; what is made is added.
    """
    budget = _budget(rollout, prompt)
    for _ in range(_MAX_CONTINUATIONS):
        if _is_whole(parts, budget):
            (sample,) = assemble(rollout, prompt, {index: parts})
            return sample
        request = _request(rollout, prompt, index, parts, budget)
        kept = rollout.partial
        with contextlib.nullcontext() if kept is None else kept.sending(prompt, index, request):
            deadline_s = rollout.config.request_deadline_s
            part = await rollout.engine.generate(request, version=version, deadline_s=deadline_s)
        if _holds(part):
            parts.append(part)
            if kept is not None:
                kept.keep(prompt, index, parts)
    raise RolloutError(
        "sample is cut again and again",
        where=f"sample {index} of group {prompt.group_id}",
        seen=f"{len(parts)} parts, {_length(parts)} of {budget} tokens",
        fix="pause with mode keep or wait instead of abort, or abort less often",
    )


def whole(rollout: Rollout, prompt: Prompt, parts: Sequence[Generation]) -> bool:
    """Tell whether a response has ended, and need not be gone on with.

    Args:
        rollout: For the budget.
        prompt: With tokens.
        parts: What there is of the response.
    """
    return _is_whole(parts, _budget(rollout, prompt))


def _is_whole(parts: Sequence[Generation], budget: int) -> bool:
    return bool(parts) and (parts[-1].status is not SampleStatus.ABORTED or _length(parts) >= budget)


def _holds(part: Generation) -> bool:
    """Tell whether a part says anything: one that was cut before its first token does not."""
    return bool(part.tokens) or part.status is not SampleStatus.ABORTED


def _budget(rollout: Rollout, prompt: Prompt) -> int:
    """Return the most tokens that a response may have."""
    most = rollout.config.max_context_tokens
    if len(prompt.tokens) >= most:
        raise RolloutError(
            "prompt leaves no room for a response",
            where=f"prompt {prompt.id}",
            seen=f"{len(prompt.tokens)} tokens",
            expected=f"fewer than max_context_tokens = {most}",
            fix="set max_prompt_tokens of the data source",
        )
    return min(most - len(prompt.tokens), rollout.config.sampling.max_tokens)


def _length(parts: Sequence[Generation]) -> int:
    return sum(len(part.tokens) for part in parts)


def _request(rollout: Rollout, prompt: Prompt, index: int, parts: Sequence[Generation], budget: int) -> GenerateRequest:
    config, turn = rollout.config, len(parts)
    so_far = tuple(chain.from_iterable(part.tokens for part in parts))
    sampling = replace(
        config.sampling,
        max_tokens=budget - len(so_far),
        min_tokens=max(0, min(config.sampling.min_tokens, budget) - len(so_far)),
    )
    return GenerateRequest(
        tokens=prompt.tokens + so_far,
        sampling=sampling,
        seed=rollout.seed_of(prompt, index, turn),
        request_id=f"{prompt.group_id}-{index}-{turn}",
        session_id=prompt.group_id if config.sticky_groups else "",
    )


def assemble(rollout: Rollout, prompt: Prompt, responses: Mapping[int, Sequence[Generation]]) -> list[Sample]:
    """Join the parts of responses to one prompt into unscored samples whose every response token is trained on.

    Args:
        rollout: For the decoder and the seeds.
        prompt: With tokens.
        responses: By the sample's index in its group; at least one part each, in order, each continues those before.

    Returns:
        The samples, in the order of the mapping.
    """
    joined = {index: _join(parts) for index, parts in responses.items()}
    texts = rollout.encoder.decode_many([response.tokens for response in joined.values()])
    seed, length = rollout.seed_of(prompt, 0), len(prompt.tokens)
    return [
        Sample(
            prompt_id=prompt.id,
            group_id=prompt.group_id,
            index=index,
            tokens=prompt.tokens + response.tokens,
            prompt_length=length,
            loss_mask=(1,) * len(response.tokens),
            logprobs=response.logprobs,
            versions=response.versions,
            # Cut at the very end of its budget it is as long as it may be: nobody is going to continue it.
            status=SampleStatus.TRUNCATED if response.status is SampleStatus.ABORTED else response.status,
            response=text,
            seed=seed + index,
            label=prompt.label,
            metadata=prompt.metadata,
            timings=Timings(response.queue_s, response.seconds, 0.0, response.attempts, response.engine),
        )
        for (index, response), text in zip(joined.items(), texts, strict=True)
    ]


def _join(parts: Sequence[Generation]) -> Generation:
    """Return the parts of one response, at least one, as one."""
    if len(parts) == 1 and len(parts[0].versions) <= 1:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.versions:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                start = spans.pop().start
            spans.append(VersionSpan(span.version, start, end))
        offset += len(part.tokens)
    return replace(
        parts[-1],
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        versions=tuple(spans),
        queue_s=sum(part.queue_s for part in parts),
        seconds=sum(part.seconds for part in parts),
        attempts=sum(part.attempts for part in parts),
    )
