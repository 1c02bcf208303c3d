"""What is asked of an engine and what comes back: tokens in, tokens out.

The wire format is vLLM's ``POST /inference/v1/generate``. Every field of the sampling parameters is sent, so that no
default of a server or of a model folder's ``generation_config.json`` decides how the policy is sampled.
(End-of-sequence ids of the generation config still stop a generation, as they should.)

Several samples of a prompt travel in one request (``n`` of vLLM), because a request costs many times what a sample in
it costs. vLLM gives the i-th of them the seed ``seed + i``, so each is the sample that a request for it alone would
make (``GenerateRequest.alone``), and a seed needs room above it.

The answer is checked before it is believed: a choice for every sample; one logprob a token, for that very token; finite
(vLLM writes -9999.0 where a logprob was NaN or -inf); version spans that cover all tokens. A token whose weights are
unknown cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from vime_rollout.errors import EngineResponseError, RolloutError
from vime_rollout.sample import SampleStatus, VersionSpan, first_bad_logprob

#: What vLLM sends in place of a logprob that is NaN or -inf.
LOGPROB_SENTINEL = -9999.0

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
_TOKEN_ID, _TOKEN, _LOGPROB = itemgetter("token_id"), itemgetter("token"), itemgetter("logprob")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response.

    With ``top_p`` < 1, ``top_k`` or ``min_p`` the logprobs that come back are those of the truncated distribution,
    which the trainer does not see: keep the defaults for exact importance ratios.

    Args:
        max_tokens: Most tokens to generate.
        min_tokens: Fewest; end-of-sequence is masked until then.
        temperature: Above 0 to sample; 0 takes the most probable token.
        top_p: Nucleus; 1 keeps all.
        top_k: Keep the k most probable; -1 keeps all.
        min_p: Keep tokens of at least this share of the most probable one's probability; 0 keeps all.
        stop: Strings that end the response; the tokens of the string stay in the response.
        stop_token_ids: Token ids that end the response; the id stays in the response.
        ignore_eos: Go on after end-of-sequence (benchmarks).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            RolloutError: Naming the parameter.
        """
        checks = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"0..{self.max_tokens}"),
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k == -1 or self.top_k >= 1, "at least 1, or -1 for all"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (ok, expected) in checks.items():
            if not ok:
                raise RolloutError(f"sampling parameter {name}", seen=str(getattr(self, name)), expected=expected)

    def to_wire(self, seed: int | None, count: int = 1) -> dict[str, Any]:
        """Return vLLM's sampling parameters, all of them explicit."""
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0),
            "min_p": self.min_p,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "seed": seed,
            "n": count,
            "logprobs": 0,  # the sampled token's own, and no others
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "detokenize": bool(self.stop),  # text is needed to find stop strings, and for nothing else
            "flat_logprobs": True,  # a few lists a sample in the server, not objects for each token to collect
            "skip_special_tokens": True,
        }


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to answer, and how; asked for one response, or for several at a time.

    Args:
        tokens: The prompt, at least one token id.
        sampling: How to sample.
        seed: Seed of the response; equal requests with equal seeds give equal tokens from equal weights. Of several
            responses the i-th has ``seed + i``.
        request_id: Name in the engine's log, and to abort it by.
        session_id: Requests of one session reach one engine behind a router with sticky sessions.
    """

    tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int | None = None
    request_id: str = ""
    session_id: str = ""

    def to_wire(self, count: int = 1) -> dict[str, Any]:
        """Return the JSON body.

        Args:
            count: Responses to ask for.
        """
        sampling = self.sampling.to_wire(self.seed, count)
        body: dict[str, Any] = {"token_ids": list(self.tokens), "sampling_params": sampling}
        if self.request_id:
            body["request_id"] = self.request_id
        return body

    def alone(self, index: int) -> GenerateRequest:
        """Return the request that makes the i-th of several responses by itself."""
        return self if self.seed is None else replace(self, seed=self.seed + index)


@dataclass(frozen=True, slots=True)
class Generation:
    """One checked answer.

    Args:
        tokens: Sampled ids, length R; an end-of-sequence id that was sampled is among them.
        logprobs: Logprob (nats) of each under the distribution sampled from, length R.
        versions: Spans that cover 0..R.
        status: How it ended.
        engine: Name of the engine.
        queue_s: Seconds waited for a free slot.
        seconds: From sending to the answer, retries included.
        attempts: Requests sent.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    status: SampleStatus
    engine: str = ""
    queue_s: float = 0.0
    seconds: float = 0.0
    attempts: int = 1


def parse_generations(
    body: Mapping[str, Any], count: int, *, engine: str, max_tokens: int, stamped: bool = True, **spent: Any
) -> tuple[Generation, ...]:
    """Check an answer of ``/inference/v1/generate`` and return its responses, in the order of their seeds.

    Args:
        body: The decoded JSON.
        count: Responses asked for.
        engine: Name of the engine, for errors.
        max_tokens: Most tokens asked for.
        stamped: Whether the engine stamps tokens with versions and names them by integer ids (vLLM 0.32). Without, the
            versions are left empty, for the caller to fill in.
        spent: ``queue_s``, ``seconds`` and ``attempts`` of the responses.

    Raises:
        EngineResponseError: When anything about it is not as the module's docstring says.
    """
    try:
        choices = {int(choice["index"]): choice for choice in body["choices"]}
        complete = sorted(choices) == list(range(count)) and len(body["choices"]) == count
    except (KeyError, TypeError, ValueError) as error:
        raise _no_completion(body, engine, error) from error
    if not complete:
        _bad(engine, "number of choices", f"choices {sorted(choices)}", f"0 to {count - 1}, each once")
    return tuple(_parse(choices[index], engine, max_tokens, stamped, spent) for index in range(count))


def _parse(
    choice: Mapping[str, Any], engine: str, max_tokens: int, stamped: bool, spent: Mapping[str, Any]
) -> Generation:
    try:
        # No loops of Python over the tokens, of which thousands come at a time.
        tokens = tuple(map(int, choice["token_ids"]))
        entries = (choice["logprobs"] or {}).get("content") or []
        scored = tuple(map(int, map(_TOKEN_ID, entries)) if stamped else map(_id_of, map(_TOKEN, entries)))
        logprobs = tuple(map(float, map(_LOGPROB, entries)))
        spans = tuple(_span(s, engine) for s in choice["weight_versions"] or []) if stamped else ()
        reason = str(choice["finish_reason"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_completion(choice, engine, error) from error
    if reason not in _STATUS:
        _bad(engine, "finish reason", reason, " or ".join(_STATUS))
    if len(tokens) > max_tokens:
        _bad(engine, "number of tokens", str(len(tokens)), f"at most {max_tokens}")
    if scored != tokens:
        _bad(engine, "logprobs", f"{len(scored)} logprobs", f"one for each of the {len(tokens)} tokens")
    if (position := first_bad_logprob(logprobs, above=LOGPROB_SENTINEL)) is not None:
        expected = "finite and at most 0 (NaN or -inf in the model?)"
        _bad(engine, f"logprob of token {position}", repr(logprobs[position]), expected)
    if stamped:
        _check_cover(engine, spans, len(tokens))
    return Generation(tokens, logprobs, spans, _STATUS[reason], engine=engine, **spent)


def _no_completion(answer: object, engine: str, error: Exception) -> EngineResponseError:
    return EngineResponseError(
        "engine answered something that is no completion",
        where=f"engine {engine}",
        seen=f"{type(error).__name__} {error} in {str(answer)[:300]}",
        expected="vLLM's generate response with logprobs and weight_versions",
    )


def _id_of(token: str) -> int:
    """Return the id in ``token_id:7``, as vLLM up to 0.31 names the token of a logprob."""
    return int(token.removeprefix("token_id:"))


def _span(value: Mapping[str, Any], engine: str) -> VersionSpan:
    try:
        version = int(value["version"])
    except ValueError as error:
        raise EngineResponseError(
            "engine's weight version is no integer",
            where=f"engine {engine}",
            seen=repr(value["version"]),
            expected="a version that an update or the start gave it",
        ) from error
    return VersionSpan(version, int(value["start"]), int(value["end"]))


def _check_cover(engine: str, spans: tuple[VersionSpan, ...], length: int) -> None:
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    if end != length:
        _bad(engine, "version spans", str(spans), f"spans that cover all {length} tokens, in order")


def _bad(engine: str, what: str, seen: str, expected: str) -> None:
    raise EngineResponseError(f"engine answered a wrong {what}", where=f"engine {engine}", seen=seen, expected=expected)
