"""What was generated of groups that a step did not need to the end, kept so that the next one goes on from it.

Three kinds of things are kept of a group that is cut, by (group id, sample index):

* samples that were finished and scored;
* responses that were finished and not scored: they are scored when the group is taken up again;
* parts of responses that were cut: they are continued from their own tokens.

Every part keeps its tokens, logprobs and versions as the engine gave them, so a continued sample has tokens of several
versions and says of each which: they are off-policy by exactly that much, and a trainer can weight or mask them. What
is older than ``max_lag`` versions is not gone on from: it is dropped and counted, and generated again.

Cutting. ``cutting`` is set for the moment in which a step ends: whoever is about to send a request is cut
(``SampleCutError``), and the names of the requests that are in engines are in ``requests``, to be aborted there.

Everything is JSON in ``state_dict``. Not thread-safe: it belongs to one event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vime_rollout.engine.request import GenerateRequest, Generation
from vime_rollout.errors import SampleCutError, StateError
from vime_rollout.sample import Prompt, Sample, SampleGroup, SampleStatus, VersionSpan

_FORMAT = 1
_Key = tuple[str, int]


@dataclass(slots=True)
class PartialCounts:
    """What has happened to kept samples since the start of the run.

    Args:
        cut: Samples that were cut with tokens in them.
        continued: Kept parts that a later step went on from.
        reused: Finished samples that a later step took as they were.
        too_old: Samples dropped because their tokens were older than ``max_lag``.
        tokens_kept: Response tokens that were not generated again.
    """

    cut: int = 0
    continued: int = 0
    reused: int = 0
    too_old: int = 0
    tokens_kept: int = 0


class PartialSamples:
    """Keeps parts of samples from step to step; see the module's docstring.

    Args:
        max_lag: Most versions that a kept token may be older than the step that goes on from it; ``None``: any.
    """

    def __init__(self, *, max_lag: int | None = None) -> None:
        """Begin empty."""
        self._max_lag = max_lag
        self._parts: dict[_Key, list[Generation]] = {}
        self._finished: dict[_Key, tuple[Sample, ...]] = {}
        self.requests: set[str] = set()
        self.cutting = False
        self.counts = PartialCounts()

    def __len__(self) -> int:
        """Number of samples of which something is kept."""
        return len(self._parts) + len(self._finished)

    def resume(self, prompt: Prompt, index: int, version: int | None) -> list[Generation]:
        """Return the kept parts of a sample, none where there are none or they are too old."""
        key = (prompt.group_id, index)
        parts = self._parts.get(key, [])
        if self._too_old([span for part in parts for span in part.versions], version):
            del self._parts[key]
            return []
        if parts:
            self.counts.continued += 1
            self.counts.tokens_kept += sum(len(part.tokens) for part in parts)
        return list(parts)

    @contextmanager
    def sending(self, prompt: Prompt, index: int, request: GenerateRequest) -> Iterator[None]:
        """Note that a request is in an engine while the block runs.

        Raises:
            SampleCutError: While the step is being cut.
        """
        if self.cutting:
            self.counts.cut += (prompt.group_id, index) in self._parts
            raise SampleCutError("sample was cut", where=f"sample {index} of group {prompt.group_id}")
        self.requests.add(request.request_id)
        try:
            yield
        finally:
            self.requests.discard(request.request_id)

    def keep(self, prompt: Prompt, index: int, parts: Sequence[Generation]) -> None:
        """Keep what there is of a response, in place of what was kept before."""
        self._parts[prompt.group_id, index] = list(parts)

    def finish(self, prompt: Prompt, index: int, records: Sequence[Sample]) -> None:
        """Keep a finished, scored sample until its group is done."""
        self._parts.pop((prompt.group_id, index), None)
        self._finished[prompt.group_id, index] = tuple(records)

    def finished(self, prompt: Prompt, index: int, version: int | None) -> tuple[Sample, ...] | None:
        """Return a sample that an earlier step finished, ``None`` where there is none or it is too old."""
        key = (prompt.group_id, index)
        records = self._finished.get(key)
        if records is None:
            return None
        if self._too_old([span for record in records for span in record.versions], version):
            del self._finished[key]
            return None
        self.counts.reused += 1
        self.counts.tokens_kept += sum(record.response_length for record in records)
        return records

    def keep_group(self, group: SampleGroup) -> None:
        """Keep all samples of a group that is done and not needed yet."""
        for index in dict.fromkeys(sample.index for sample in group):
            self.finish(group.prompt, index, [sample for sample in group if sample.index == index])

    def forget(self, prompt: Prompt) -> None:
        """Drop all that is kept of a group, because it is done or given up."""
        group_id = prompt.group_id
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] != group_id}
        self._finished = {key: records for key, records in self._finished.items() if key[0] != group_id}

    def _too_old(self, spans: Sequence[VersionSpan], version: int | None) -> bool:
        if self._max_lag is None or version is None or not spans:
            return False
        too_old = version - min(span.version for span in spans) > self._max_lag
        self.counts.too_old += too_old
        return too_old

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept, and the counts, as JSON values."""
        return {
            "format": _FORMAT,
            "parts": [[*key, [_to_dict(part) for part in parts]] for key, parts in self._parts.items()],
            "finished": [[*key, [s.to_dict() for s in records]] for key, records in self._finished.items()],
            "counts": dataclasses.asdict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            StateError: When it has another format.
            SampleError: When a saved sample is not whole.
        """
        if state.get("format") != _FORMAT:
            raise StateError("partial samples of another format", seen=str(state.get("format")), expected=str(_FORMAT))
        parts = {(group, index): [_from_dict(v) for v in values] for group, index, values in state["parts"]}
        finished = {(g, i): tuple(Sample.from_dict(v) for v in values) for g, i, values in state["finished"]}
        self._parts, self._finished = parts, finished
        self.counts = PartialCounts(**state["counts"])


def _to_dict(part: Generation) -> dict[str, Any]:
    values = dataclasses.asdict(part)
    values["versions"] = [[span.version, span.start, span.end] for span in part.versions]
    return {**values, "tokens": list(part.tokens), "logprobs": list(part.logprobs), "status": part.status.value}


def _from_dict(values: Mapping[str, Any]) -> Generation:
    return Generation(
        **{
            **values,
            "tokens": tuple(values["tokens"]),
            "logprobs": tuple(values["logprobs"]),
            "versions": tuple(VersionSpan(*span) for span in values["versions"]),
            "status": SampleStatus(values["status"]),
        }
    )
