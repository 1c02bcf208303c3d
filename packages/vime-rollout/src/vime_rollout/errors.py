"""The errors of vime-rollout: one small branch of the ``VimeError`` family.

Who may retry what follows from the class. ``EngineBusyError`` and ``EngineTimeoutError`` concern one request and may be
tried again; ``EngineDeadError`` and ``EngineTornError`` concern the engine, so the request may be tried on another one;
the rest are facts about the input or the set-up, and trying again would only repeat them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime_devices import VimeError


class RolloutError(VimeError):
    """Base of the errors of vime-rollout."""


class SampleError(RolloutError):
    """A sample or a group breaks one of its invariants (lengths, spans, scored twice)."""


class DataError(RolloutError):
    """Prompts cannot be read: missing file, broken line, missing key, empty data set, prompt too long."""


class StateError(RolloutError):
    """A saved state does not belong to the object that should load it."""


class DataBufferError(RolloutError):
    """The data buffer refuses a group: unknown, admitted twice, unscored, or no room."""


class RewardError(RolloutError):
    """A reward function cannot be found, failed, or answered something that is no score."""


class ExtensionError(RolloutError):
    """What a dotted path names cannot be imported, or cannot be called as it will be."""


class SampleCutError(RolloutError):
    """A sample was cut because the step needs no more of it; what there is of it is kept for the next one."""


class EngineError(RolloutError):
    """Base of everything that concerns one engine."""


class EngineStartError(EngineError):
    """The engine could not be started (busy port, bad model folder, deadline passed, died on the way)."""


class EngineStateError(EngineError):
    """An illegal move between engine states, or a request in a state that cannot serve it."""


class EngineRequestError(EngineError):
    """The engine refused the request itself (HTTP 4xx): a retry would be refused as well."""


class EngineResponseError(EngineError):
    """The engine answered something that is not a valid completion: wrong lengths, NaN logprobs, no version."""


class EngineBusyError(EngineError):
    """A request failed in a way that may pass (connection lost, HTTP 5xx), and its retries are used up."""


class EngineTimeoutError(EngineError):
    """A request passed its deadline."""


class EngineDeadError(EngineError):
    """The engine's process ended; the text carries the tail of its log."""


class EngineTornError(EngineError):
    """The engine's weights are not known to be whole; it must not generate until they are sent again."""


class VersionMismatchError(EngineError):
    """Tokens were sampled by other weights than those that were asked for."""


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note, once, to an error of this package that leaves the block; a sample that was cut on purpose is none.

    Args:
        note: What the error is about, such as which sample.
    """
    try:
        yield
    except RolloutError as error:
        if not isinstance(error, SampleCutError) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
