"""Samples, data buffer, vLLM engines and rewards: the rollout side of RL post-training.

One trip: a ``DataSource`` hands out prompts; a ``Rollout`` has an engine (or a pool of them) answer each prompt several
times and scores the answers; the scored ``SampleGroup`` goes into the ``DataBuffer``, where the trainer takes it.
"""

from vime_rollout.data import DataConfig, DataSource, EpochSource, open_data_source
from vime_rollout.data.rows import RowKeys
from vime_rollout.engine import (
    CpuOptions,
    Engine,
    EngineConfig,
    EngineState,
    GenerateRequest,
    Generation,
    RemoteEngine,
    SamplingParams,
    VLLMEngine,
)
from vime_rollout.errors import RolloutError
from vime_rollout.sample import Prompt, Sample, SampleGroup, SampleStatus, Timings, VersionSpan, full_length
from vime_rollout.tokens import Encoder

__all__ = [
    "CpuOptions",
    "DataConfig",
    "DataSource",
    "Encoder",
    "Engine",
    "EngineConfig",
    "EngineState",
    "EpochSource",
    "GenerateRequest",
    "Generation",
    "Prompt",
    "RemoteEngine",
    "RolloutError",
    "RowKeys",
    "Sample",
    "SampleGroup",
    "SampleStatus",
    "SamplingParams",
    "Timings",
    "VLLMEngine",
    "VersionSpan",
    "full_length",
    "open_data_source",
]
