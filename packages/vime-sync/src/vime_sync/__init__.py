"""Planned, transactional weight sync from a trainer to vLLM engines.

The trainer describes where its weights are (`WeightSource`), exposes them (`Publisher`), and drives a transaction over
the engines (`SyncSession`). The engine learns once, from the model's own weight loaders, where every slice goes.
"""

from vime_sync.choice import Choice, choose_transport
from vime_sync.control import sweep
from vime_sync.digest import Digest
from vime_sync.errors import (
    AliasError,
    AlreadyStartedError,
    AsleepError,
    DigestError,
    DtypeMismatchError,
    EmptyUpdateError,
    EngineError,
    IncompletePlanError,
    ManifestError,
    NotPausedError,
    NotStartedError,
    PlanError,
    SecondTrainerError,
    ShapeMismatchError,
    StaleSourceError,
    SyncError,
    TornEngineError,
    TransactionError,
    TransportError,
    UnknownNameError,
    UnplannableError,
    VersionConflictError,
    WindowError,
)
from vime_sync.launch import engine_arguments, engine_environment
from vime_sync.layout import Box, CheckpointTensor, Piece, Region
from vime_sync.manifest import merge_manifests
from vime_sync.publisher import Publisher
from vime_sync.report import SyncReport
from vime_sync.session import SyncSession
from vime_sync.source import WeightSource
from vime_sync.transports.shm import release_shared, shared_empty
from vime_sync.verify import Comparison, compare

__all__ = [
    "AliasError",
    "AlreadyStartedError",
    "AsleepError",
    "Box",
    "CheckpointTensor",
    "Choice",
    "Comparison",
    "Digest",
    "DigestError",
    "DtypeMismatchError",
    "EmptyUpdateError",
    "EngineError",
    "IncompletePlanError",
    "ManifestError",
    "NotPausedError",
    "NotStartedError",
    "Piece",
    "PlanError",
    "Publisher",
    "Region",
    "SecondTrainerError",
    "ShapeMismatchError",
    "StaleSourceError",
    "SyncError",
    "SyncReport",
    "SyncSession",
    "TornEngineError",
    "TransactionError",
    "TransportError",
    "UnknownNameError",
    "UnplannableError",
    "VersionConflictError",
    "WeightSource",
    "WindowError",
    "choose_transport",
    "compare",
    "engine_arguments",
    "engine_environment",
    "merge_manifests",
    "release_shared",
    "shared_empty",
    "sweep",
]
