"""Releases of vLLM: unknown options are not passed, and answers without versions get the right one.

Older releases are played by a server that takes only the options of theirs and answers in their format, as read in
their sources; the newest one is the real engine of ``test_rollout_real_engine.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest
from vime_rollout import (
    EngineClient,
    EngineConfig,
    EnginePool,
    EngineState,
    GenerateRequest,
    RemoteEngine,
    SamplingParams,
)
from vime_rollout import VersionSpan as Span
from vime_rollout.engine import VLLMEngine
from vime_rollout.engine.window import dialect_of, installed_release
from vime_rollout.errors import EngineResponseError, EngineStartError, VersionMismatchError

SERVER = '''
"""A server with the options, routes and answers of vLLM 0.29."""
import argparse, json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("model served-model-name host port dtype seed tensor-parallel-size max-model-len gpu-memory-utilization "
             "load-format logprobs-mode").split():
    parser.add_argument(f"--{name}")
for name in "enforce-eager enable-sleep-mode disable-uvicorn-access-log".split():
    parser.add_argument(f"--{name}", action="store_true")
options = parser.parse_args()
state = {"weight_version": "default"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): ...

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"/health": {}, "/version": {"version": "0.29.0"}, "/weight_info": state,
                     "/v1/models": {"data": [{"id": options.served_model_name}]}}[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/update_weight_version":
            state["weight_version"] = body["new_version"]
            return self.answer({"success": True})
        tokens = [7, 8][: body["sampling_params"]["max_tokens"]]
        content = [{"token": f"token_id:{t}", "logprob": -0.5, "top_logprobs": []} for t in tokens]
        choice = {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
        self.answer({"request_id": "a", "choices": [choice]})


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
'''


def interpreter_with(tmp_path, release, name="vllm"):
    """Make an interpreter that has another vLLM than ours before it on its path."""
    site = tmp_path / "site"
    info = site / f"{name.replace('-', '_')}-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "top_level.txt").write_text("vllm\n")
    (site / "old_vllm_server.py").write_text(SERVER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("release", "option", "stamps", "many"),
    [
        ("0.28.0", False, False, False),
        ("0.29.1.dev3+g98dff2a", False, False, True),
        ("0.30.0", True, False, True),
        ("0.31.2", True, False, True),
        ("0.32.0", True, True, True),
        ("0.33.0", True, True, True),
        ("1.0.0", True, True, True),
    ],
)
def test_a_release_decides_options_and_answers(caplog, release, option, stamps, many):
    with caplog.at_level(logging.WARNING):
        dialect = dialect_of(release, where="engine e")
    assert (dialect.release, dialect.scale_out_option, dialect.stamps_tokens) == (release, option, stamps)
    assert dialect.many_samples is many
    assert ("--enable-scale-out" in EngineConfig(model="/m").command(1, dialect)) is option
    assert ("before and after" in caplog.text) is not stamps
    assert ("newer than what is tested" in caplog.text) is (release in ("0.33.0", "1.0.0"))


@pytest.mark.parametrize(("release", "what"), [("0.27.9", "older than"), ("main", "cannot be read")])
def test_what_is_outside_the_window_is_refused(release, what):
    with pytest.raises(EngineStartError, match=what) as caught:
        dialect_of(release, where="engine e")
    assert (caught.value.where, caught.value.expected) == ("engine e", "0.28 to 0.32")


def test_the_release_is_that_of_the_engine_s_interpreter(tmp_path):
    assert installed_release(sys.executable).startswith("0.")
    assert installed_release(interpreter_with(tmp_path / "a", "0.29.0")) == "0.29.0"
    assert installed_release(interpreter_with(tmp_path / "b", "9.9.9", "vllm")) == "9.9.9"
    with pytest.raises(EngineStartError, match="cannot be asked"):
        installed_release(str(tmp_path / "none"))
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EngineStartError, match="not installed") as caught:
        installed_release(str(bare))
    assert str(bare) in caught.value.where


async def test_an_older_release_is_started_and_generates(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    python = interpreter_with(tmp_path, "0.29.0")
    options = {"module": "old_vllm_server", "log_path": str(tmp_path / "log"), "start_deadline_s": 120.0}
    engine = VLLMEngine(EngineConfig(model=str(tmp_path), python=python, enforce_eager=True, **options))
    async with engine:
        answer = await engine.generate(GenerateRequest((5,), SamplingParams(max_tokens=2)), version=0)
        assert (answer.tokens, answer.versions) == ((7, 8), (Span(0, 0, 2),))
        await engine.restart()
        assert (engine.state, engine.version) == (EngineState.READY, -1)
    assert engine.pids == []
    assert "unrecognized" not in (tmp_path / "log").read_text()


async def test_an_option_that_the_release_does_not_know_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    python = interpreter_with(tmp_path, "0.32.0")  # it says that it is newer than it is
    options = {"module": "old_vllm_server", "log_path": str(tmp_path / "log"), "start_deadline_s": 120.0}
    engine = VLLMEngine(EngineConfig(model=str(tmp_path), python=python, **options))
    with pytest.raises(EngineStartError, match="unrecognized arguments: --enable-scale-out"):
        await engine.start()
    assert engine.pids == []


def unstamped(tokens, prefix="token_id:"):
    content = [{"token": f"{prefix}{t}", "logprob": -0.5} for t in tokens]
    choice = {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
    return {"choices": [choice]}


async def test_a_pool_counts_requests_whose_version_is_being_asked_for(start_server):
    servers = [start_server(4), start_server(4)]
    for server in servers:
        server.release, server.answers = "0.30.0", [(200, unstamped([7]))] * 4
    engines = [RemoteEngine(server.url, name=f"e{i}") for i, server in enumerate(servers)]
    for engine in engines:
        await engine.connect()
    ask = GenerateRequest((5,), SamplingParams(max_tokens=2))
    pool = EnginePool(engines)
    await asyncio.gather(*(pool.generate(ask) for _ in range(4)))
    assert [len(server.generations()) for server in servers] == [2, 2]
    assert pool.in_flight == 0
    for engine in engines:
        await engine.stop()


async def test_versions_that_are_not_stamped_are_asked_for(start_server):
    server = start_server(4)
    server.release = "0.30.0"
    server.answers = [(200, unstamped([7, 8])), (200, unstamped([])), (200, unstamped([7], prefix="x"))]
    client = EngineClient(server.url, name="e0", request_deadline_s=60.0)
    engine = RemoteEngine(server.url, name="e0", client=client)
    await engine.connect()
    ask = GenerateRequest((5,), SamplingParams(max_tokens=2))
    assert (await engine.generate(ask, version=4)).versions == (Span(4, 0, 2),)
    assert (await engine.generate(ask)).versions == ()
    with pytest.raises(EngineResponseError, match="no completion"):
        await engine.generate(ask)

    generate = engine._client.generate_many

    async def updated_meanwhile(request, count, **options):
        answer = await generate(request, count, **options)
        server.label = str(int(server.label) + 1)
        return answer

    engine._client.generate_many = updated_meanwhile
    server.answers = [(200, unstamped([7, 8]))] * 2
    assert (await engine.generate(ask)).versions == (Span(4, 0, 2),)  # the older one
    with pytest.raises(VersionMismatchError, match="engine at version 6"):
        await engine.generate(ask, version=5)
    await engine.stop()
