"""Samples, data buffer, vLLM engines and rewards: the rollout side of RL post-training.

One trip: a ``DataSource`` hands out prompts; a ``Rollout`` has an engine (or a pool of them) answer each prompt several
times and scores the answers; the scored ``SampleGroup`` goes into the ``DataBuffer``, where the trainer takes it.
"""

from vime_rollout.buffer import BufferCounts, DataBuffer
from vime_rollout.data import DataConfig, DataSource, EpochSource, open_data_source
from vime_rollout.data.rows import RowKeys
from vime_rollout.engine import (
    UNSENT_VERSION,
    CpuOptions,
    Engine,
    EngineClient,
    EngineConfig,
    EngineState,
    GenerateRequest,
    Generation,
    RemoteEngine,
    SamplingParams,
    VLLMEngine,
)
from vime_rollout.errors import RolloutError
from vime_rollout.evaluate import EVALUATION_EPOCH, evaluate, evaluation_prompts
from vime_rollout.extend import load_filter, load_generate, load_source
from vime_rollout.filters import GroupFilter
from vime_rollout.metrics import rollout_metrics, zero_reasons
from vime_rollout.pool import EnginePool
from vime_rollout.rewards import Reward, Score, load_reward
from vime_rollout.rollout import GenerateFunction, Rollout, RolloutConfig
from vime_rollout.sample import Prompt, Sample, SampleGroup, SampleStatus, Timings, VersionSpan, full_length
from vime_rollout.single_turn import single_turn
from vime_rollout.together import Slots
from vime_rollout.tokens import Encoder

__all__ = [
    "EVALUATION_EPOCH",
    "UNSENT_VERSION",
    "BufferCounts",
    "CpuOptions",
    "DataBuffer",
    "DataConfig",
    "DataSource",
    "Encoder",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EnginePool",
    "EngineState",
    "EpochSource",
    "GenerateFunction",
    "GenerateRequest",
    "Generation",
    "GroupFilter",
    "Prompt",
    "RemoteEngine",
    "Reward",
    "Rollout",
    "RolloutConfig",
    "RolloutError",
    "RowKeys",
    "Sample",
    "SampleGroup",
    "SampleStatus",
    "SamplingParams",
    "Score",
    "Slots",
    "Timings",
    "VLLMEngine",
    "VersionSpan",
    "evaluate",
    "evaluation_prompts",
    "full_length",
    "load_filter",
    "load_generate",
    "load_reward",
    "load_source",
    "open_data_source",
    "rollout_metrics",
    "single_turn",
    "zero_reasons",
]
