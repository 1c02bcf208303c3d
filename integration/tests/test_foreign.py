"""Engines of somebody else are asked what they serve with: vLLM's own route, over a real connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from integration_support import POLICY, config_file
from vime_grpo import RunConfig, load_config
from vime_integration.doctor import Status
from vime_integration.doctor.configuration import check_configuration
from vime_integration.entry import run
from vime_integration.errors import PipelineError
from vime_integration.foreign import check_foreign, look_at_foreign

Serve = Callable[[FastAPI], str]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Serve an application on a port of its own; returns its address."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: FastAPI) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def vllm_app() -> Callable[..., FastAPI]:
    """vLLM's own answer about itself, for an engine with these arguments; no engine is started."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.serve.dev.server_info.api_router import attach_router

    def make(**arguments: Any) -> FastAPI:
        app = FastAPI()
        attach_router(app)
        app.state.vllm_config = EngineArgs(model=str(POLICY), enforce_eager=True, **arguments).create_engine_config()
        return app

    return make


@pytest.fixture(scope="module")
def bare(vllm_app: Callable[..., FastAPI], serve: Serve) -> str:
    """An engine in bfloat16 that was told nothing else."""
    return serve(vllm_app(dtype="bfloat16", max_model_len=64))


@pytest.fixture(scope="module")
def told(vllm_app: Callable[..., FastAPI], serve: Serve) -> str:
    """An engine that was told what a run needs."""
    return serve(
        vllm_app(
            dtype="bfloat16",
            max_model_len=128,
            hf_overrides={"head_dtype": "float32"},
            logprobs_mode="processed_logprobs",
        )
    )


def asking(folder: Path, url: str, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    path = config_file(folder, steps=1, save_every=0)
    return load_config(path, ["engine.count=0", f"engine.urls=['{url}']", *overrides])


def test_an_engine_that_was_told_what_the_run_needs_fits(told: str, tmp_path: Path) -> None:
    (found,) = look_at_foreign(asking(tmp_path, told, "rollout.temperature=0.7"))
    assert (found.asked, found.problems) == (True, ())
    assert found.seen == f"{POLICY} in bfloat16"
    assert check_foreign(asking(tmp_path, told)) == []


def test_an_engine_that_was_told_nothing_is_refused_with_the_arguments_it_needs(bare: str, tmp_path: Path) -> None:
    config = asking(tmp_path, bare, "rollout.temperature=0.7")
    (found,) = look_at_foreign(config)
    head, length, mode = found.problems
    assert head.startswith("its logits are bfloat16 and the trainer's float32")
    assert head.endswith("--hf-overrides.head_dtype float32")
    assert length.endswith("--max-model-len 96")
    assert mode.endswith("--logprobs-mode processed_logprobs")
    with pytest.raises(PipelineError, match="does not fit the run"):
        run(config)
    assert not config.pipeline.run_dir.exists(), "nothing was started, and no folder made"
    checks = [check for check in check_configuration(config) if check.name == "config.engines"]
    assert [check.status for check in checks] == [Status.FAIL]


def test_what_the_run_does_not_need_is_not_asked_for(bare: str, tmp_path: Path) -> None:
    """At temperature 1, from the whole distribution, raw logprobs are those of what is sampled."""
    config = asking(tmp_path, bare, "model.head_dtype=model", "rollout.max_context_tokens=64")
    assert [found.problems for found in look_at_foreign(config)] == [()]


def test_an_engine_that_cannot_be_asked_is_said_once_and_used(serve: Serve, tmp_path: Path) -> None:
    url = serve(FastAPI())
    assert check_foreign(asking(tmp_path, url)) == [
        f"{url} is taken as it is: /server_info answers 404, so its settings cannot be checked"
    ]
    app = FastAPI()
    app.get("/server_info")(lambda: {"vllm_config": "text of an older release"})
    (found,) = look_at_foreign(asking(tmp_path, serve(app)))
    assert not found.asked
    assert "cannot be read (TypeError" in found.seen


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"does not answer.*127.0.0.1:9.*ConnectError"):  # nobody listens there
        check_foreign(asking(tmp_path, "http://127.0.0.1:9"))
