"""Shared fixtures: a tiny model made from a seed, samples, and an HTTP server that misbehaves on purpose."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vime_rollout import Prompt, Sample, SampleGroup, SampleStatus, VersionSpan

CHARACTERS = list("0123456789+-*=? .,:abcdefghijklmnopqrstuvwxyz<>/\n")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a character, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with random weights from a seed, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    for parameter in model.parameters():  # far enough from uniform that a wrong logprob cannot pass for a right one
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Build a valid sample, with some fields replaced."""

    def build(**changes: Any) -> Sample:
        fields: dict[str, Any] = {
            "prompt_id": "p:0",
            "group_id": "p:0@0",
            "index": 0,
            "tokens": (5, 6, 7, 8, 9),
            "prompt_length": 2,
            "loss_mask": (1, 1, 1),
            "logprobs": (-0.5, -1.0, -1.5),
            "versions": (VersionSpan(3, 0, 3),),
            "status": SampleStatus.COMPLETED,
            "response": "789",
            "label": "789",
        }
        return Sample(**{**fields, **changes})

    return build


@pytest.fixture
def make_group(make_sample: Callable[..., Sample]) -> Callable[..., SampleGroup]:
    """Build a scored group of a prompt at a position, all its tokens of one version."""

    def build(position: int, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.5)) -> SampleGroup:
        prompt = Prompt(id=f"p:{position}", text="1+1=", position=position, tokens=(5, 6))
        spans = (VersionSpan(version, 0, 3),)
        fields = {"prompt_id": prompt.id, "group_id": prompt.group_id, "versions": spans}
        samples = [
            make_sample(index=i, **fields).scored(reward, "none" if reward == 0 else "")
            for i, reward in enumerate(rewards)
        ]
        return SampleGroup(prompt, tuple(samples))

    return build


def completion(tokens: list[int], *, version: str = "0", finish: str = "stop") -> dict[str, Any]:
    """A body as vLLM 0.32 answers it (the real-engine tests check the real one against the same parser)."""
    return {
        "request_id": "generate-tokens-a",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "token_ids": tokens,
                "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
                "logprobs": {"content": [{"token_id": t, "logprob": -0.25, "rank": 1} for t in tokens]},
            }
        ],
    }


class FaultyServer:
    """An HTTP server whose next answers are given by the test: (status, body), ``"hang"`` or ``"drop"``.

    A queue that is empty answers with a good completion. Faults that a real engine cannot be brought to show at will.
    With a ``label``, the routes of health and weight version answer as a server's whose weights have it, and only
    generations take from the queue. With a ``meeting``, each answer waits until so many requests are there.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: list[tuple[str, Any]] = []
        self.peak = 0
        self.label: str | None = None
        self.release = "0.32.0"
        self.delay_s = 0.0
        self.meeting: threading.Barrier | None = None
        self._running = 0
        self._lock = threading.Lock()
        self._release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                outer.handle(self)

            def do_POST(self) -> None:
                outer.handle(self)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # of its own it is 5, and the kernel drops what is more

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length", 0))
        body = json.loads(handler.rfile.read(length)) if length else None
        with self._lock:
            self.requests.append((handler.path.partition("?")[0], body))
            answer = self._answer(handler.path, body)
            self._running += 1
            self.peak = max(self.peak, self._running)
        if self.meeting is not None:
            self.meeting.wait(60)
        time.sleep(self.delay_s)
        if answer == "hang":
            self._release.wait(300)
        with self._lock:
            self._running -= 1  # before the answer leaves: a client that has it may send the next request at once
        if answer not in ("hang", "drop"):
            self._send(handler, *answer)

    def _answer(self, path: str, body: Any) -> Any:
        if path == "/version":
            return (200, {"version": self.release})
        if self.label is not None and path == "/update_weight_version":
            self.label = body["new_version"]
        if self.label is not None and not path.startswith("/inference"):
            return (200, {"weight_version": self.label})
        return self.answers.pop(0) if self.answers else (200, completion([7, 8, 1], version=self.label or "0"))

    def generations(self) -> list[Any]:
        """Return the bodies of the generations asked for so far."""
        return [body for path, body in self.requests if path.startswith("/inference")]

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def close(self) -> None:
        if self._release.is_set():
            return
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def faulty_server() -> Iterator[FaultyServer]:
    """A server that misbehaves on purpose."""
    server = FaultyServer()
    yield server
    server.close()


@pytest.fixture
def start_server() -> Iterator[Callable[[int], FaultyServer]]:
    """Start servers that misbehave on purpose, each with weights of a version."""
    servers: list[FaultyServer] = []

    def start(version: int) -> FaultyServer:
        servers.append(FaultyServer())
        servers[-1].label = str(version)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def good_completion() -> Callable[..., dict[str, Any]]:
    """Build a good answer of an engine."""
    return completion
