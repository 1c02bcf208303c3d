"""The built-in generate function: one response to one prompt, or several in one request.

A response that is cut from outside (``aborted``) is continued from its own tokens: what was sampled is never sampled
again, and keeps its logprobs and versions. With partial samples kept, the cut may outlast the step: generation stops
there, and the next step goes on from the same tokens with the weights of then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
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
        if parts and (parts[-1].status is not SampleStatus.ABORTED or _length(parts) >= budget):
            return assemble(rollout, prompt, index, parts)
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
    so_far = tuple(token for part in parts for token in part.tokens)
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
        # Cut at the very end of its budget it is as long as it may be: nobody is going to continue it.
        status=SampleStatus.TRUNCATED if parts[-1].status is SampleStatus.ABORTED else parts[-1].status,
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
