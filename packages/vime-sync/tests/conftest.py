"""Fixtures: tiny HF model folders made by code, and real vLLM servers on the CPU, shared by a whole test session."""

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file
from vime_sync import Publisher, SyncSession, WeightSource, engine_arguments, engine_environment
from vime_sync.client import EngineClient

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests: sync_*.py

from sync_models import DENSE, checkpoint


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """A function that writes a HF folder (config, weights, tokenizer) for a config and a seed."""

    def make(config=DENSE, seed=0, weights=True):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {f"w{i}": i for i in range(3, config["vocab_size"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
        ).save_pretrained(folder)
        if weights:
            save_file(checkpoint(config, seed), folder / "model.safetensors")
        return folder

    return make


class Server:
    """A vLLM server process and the few requests that tests make of it."""

    def __init__(self, folder, *extra, log, dtype="float32", arguments=None, port=0):
        if not port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        self.port, self.url, self.model, self.log = port, f"http://127.0.0.1:{port}", str(folder), Path(log)
        # vLLM leaves sockets and rendezvous files behind when it is killed; torch's cache is to be kept.
        self._temporary = tempfile.TemporaryDirectory(prefix="vime-", ignore_cleanup_errors=True)
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        environment = (
            os.environ
            | engine_environment()
            | {
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_WORKER_MULTIPROC_METHOD": "fork",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_LOGGING_LEVEL": "INFO",
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": self._temporary.name,
                "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache)),
            }
        )
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            self.model,
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--dtype",
            dtype,
            "--max-model-len",
            "128",
            "--max-num-seqs",
            "8",
            "--enforce-eager",
            "--enable-scale-out",
            "--logprobs-mode",
            "processed_logprobs",
            *(engine_arguments() if arguments is None else arguments),
            *extra,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self, deadline_s=240):
        """Wait until the server answers."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=2).is_success:
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError("no server: " + self.log.read_text(errors="replace")[-3000:])

    def generate(self, prompt=(5, 6, 7, 8), tokens=12):
        """Greedy tokens, their logprobs and the version spans."""
        body = {
            "token_ids": list(prompt),
            "stream": False,
            "sampling_params": {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1, "ignore_eos": True},
        }
        response = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=120)
        response.raise_for_status()
        return response.json()["choices"][0]

    def post(self, path, **body):
        """POST to a route; the raw response."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def checksums(self):
        """SHA-256 of every live parameter, as vLLM's own weight checker computes it."""
        return self.post("/weight_checker", action="checksum").json()["checksums"]

    def state(self):
        """What the engine says of itself."""
        return httpx.get(f"{self.url}/vime/state", timeout=20).json()

    def kill(self):
        """End the whole process group without a word."""
        self.stop((signal.SIGKILL,))

    def stop(self, signs=(signal.SIGTERM, signal.SIGKILL)):
        """End the whole process group, and remove what it leaves."""
        for sign in signs:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, sign)
                self.process.wait(20)
        self._temporary.cleanup()


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """A function that starts a server; all are stopped at the end of the session."""
    servers = []

    def start(folder, *extra, **options):
        server = Server(folder, *extra, log=tmp_path_factory.mktemp("server") / "log", **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


TIED = DENSE | {"tie_word_embeddings": True, "vocab_size": 100}


def pytest_collection_modifyitems(items):
    """Tests on the real engine come last, so that it can start while the others run."""
    items.sort(key=lambda item: item.path.name.startswith("test_sync_engine"))


@pytest.fixture(scope="session")
def booting(request, make_model, serve):
    """The server of test_sync_engine.py, started as soon as a test of this package runs, if it will be needed."""
    wanted = any(item.path.name == "test_sync_engine.py" for item in request.session.items)
    return serve(make_model(TIED, seed=0), "--block-size", "32") if wanted else None


@pytest.fixture(scope="session", autouse=True)
def _boot(booting):
    """See `booting`."""


@pytest.fixture(autouse=True)
def _connections_are_closed(monkeypatch):
    """No test ends with a connection to an engine that nobody closed: such sockets pile up in a trainer's process.

    Counted here, not left to `ResourceWarning`, which names whatever test the garbage collector happens to run in.
    """
    made, real = [], EngineClient.__init__

    def noted(client, *arguments, **options):
        made.append(client)
        real(client, *arguments, **options)

    monkeypatch.setattr(EngineClient, "__init__", noted)
    yield
    assert [client.url for client in made if not client._http.is_closed] == []


@pytest.fixture
def engines():
    """A function that starts a fake engine (see `sync_fake_engine`); all are stopped after the test."""
    from sync_fake_engine import FakeEngine

    started = []

    def start(**options):
        started.append(FakeEngine(**options))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


class Trainer:
    """Weights in this process, a publisher of them, and sessions to engines."""

    def __init__(self, tensors, transport="shm", digest="full", **options):
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.publisher = Publisher(WeightSource.from_tensors(self.tensors), transport, digest=digest, **options)
        self.sessions = []

    def load(self, tensors):
        """Overwrite the weights in place, as an optimiser does."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    def session(self, *engines, deadline_s=20.0, manifest=None, **options):
        urls = [engine.url for engine in engines]
        manifest = manifest or self.publisher.manifest()
        self.sessions.append(SyncSession(urls, manifest, deadline_s=deadline_s, **options))
        return self.sessions[-1]

    def close(self):
        for session in self.sessions:
            session.close()
        self.publisher.close()


@pytest.fixture
def trainers():
    """A function that makes a `Trainer`; all are closed after the test."""
    made = []

    def make(tensors, *arguments, **options):
        made.append(Trainer(tensors, *arguments, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
