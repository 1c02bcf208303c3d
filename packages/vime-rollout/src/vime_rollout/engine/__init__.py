"""Engines: one vLLM server each, owned (``VLLMEngine``) or only reached (``RemoteEngine``)."""

from vime_rollout.engine.client import EngineClient
from vime_rollout.engine.config import CpuOptions, EngineConfig
from vime_rollout.engine.ports import held_port
from vime_rollout.engine.remote import UNSENT_VERSION, Engine, RemoteEngine
from vime_rollout.engine.request import GenerateRequest, Generation, SamplingParams
from vime_rollout.engine.scratch import temporary_variables
from vime_rollout.engine.state import EngineState
from vime_rollout.engine.vllm import VLLMEngine

__all__ = [
    "UNSENT_VERSION",
    "CpuOptions",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineState",
    "GenerateRequest",
    "Generation",
    "RemoteEngine",
    "SamplingParams",
    "VLLMEngine",
    "held_port",
    "temporary_variables",
]
