"""Every way a weight sync can be refused or fail, as a small family of named errors.

Errors cross a process boundary as JSON (never as pickled exceptions), so a refusal that an engine worker raised arrives
in the trainer as the same class with the same fields: `to_wire` and `from_wire` are each other's inverse, and an
unknown class name falls back to `SyncError` with its text intact.
"""

from __future__ import annotations

from typing import Any

from vime_devices import VimeError


class SyncError(VimeError):
    """Base of the errors of vime-sync."""


class ManifestError(SyncError):
    """A manifest is malformed, or the manifests of several ranks do not form whole tensors."""


class PlanError(SyncError):
    """The manifest cannot be mapped onto the engine's live parameters."""


class UnknownNameError(PlanError):
    """The model's loaders do not know a checkpoint tensor of this name."""


class ShapeMismatchError(PlanError):
    """A checkpoint tensor's shape does not fit the parameter it belongs to."""


class DtypeMismatchError(PlanError):
    """A checkpoint tensor's dtype cannot be stored in the parameter without a cast that was not asked for."""


class IncompletePlanError(PlanError):
    """Some live element would be written never, or more than once."""


class UnplannableError(PlanError):
    """A live tensor's layout is not a copy of checkpoint slices (quantised, shuffled, computed)."""


class AliasError(PlanError):
    """A live tensor is not one contiguous region of a trainer buffer, so it cannot be aliased."""


class TransportError(SyncError):
    """Bytes could not be moved between the trainer and an engine."""


class StaleSourceError(TransportError):
    """The trainer's memory is gone, belongs to another publisher, or holds another version than the one asked for."""


class DigestError(SyncError):
    """The bytes that arrived are not the bytes that were published."""


class TransactionError(SyncError):
    """A step of the transaction is not allowed now; nothing was written."""


class VersionConflictError(TransactionError):
    """The version is not newer than the engine's, or the engine is not at the version the update starts from."""


class NotPausedError(TransactionError):
    """A commit was asked of an engine that is still generating."""


class AsleepError(TransactionError):
    """The engine's weights are offloaded (sleep mode): there is nothing to write into."""


class AlreadyStartedError(TransactionError):
    """An update is already open on this engine."""


class NotStartedError(TransactionError):
    """A step needs an update or a connection that is not there."""


class EmptyUpdateError(TransactionError):
    """The manifest names no tensor."""


class SecondTrainerError(TransactionError):
    """Another live trainer owns this engine."""


class TornEngineError(TransactionError):
    """The engine's bytes are a mix of versions; it refuses to serve until a whole version is sent again."""


class EngineError(SyncError):
    """An engine did not answer in time, or answered with something that is not ours."""


class WindowError(SyncError):
    """The installed vLLM lacks a part of the interface that the plugin uses."""


def _family(base: type[SyncError]) -> dict[str, type[SyncError]]:
    found = {base.__name__: base}
    for sub in base.__subclasses__():
        found |= _family(sub)
    return found


def to_wire(error: SyncError) -> dict[str, str]:
    """Turn an error into a JSON object.

    Args:
        error: Any error of this package.

    Returns:
        Its class name and fields.
    """
    return {
        "error": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "seen": error.seen,
        "expected": error.expected,
        "fix": error.fix,
    }


def from_wire(record: dict[str, Any], *, where: str = "") -> SyncError:
    """Rebuild the error that `to_wire` described.

    Args:
        record: The JSON object; missing fields are empty.
        where: Put in front of the error's own location (the engine's address, say).

    Returns:
        An error of the named class, or a `SyncError` if this version does not know the class.
    """
    cls = _family(SyncError).get(str(record.get("error", "")), SyncError)
    inner = str(record.get("where", ""))
    place = f"{where}: {inner}" if where and inner else where or inner
    fields = {key: str(record.get(key, "")) for key in ("seen", "expected", "fix")}
    return cls(str(record.get("what", "an engine reported an error without a text")), where=place, **fields)
