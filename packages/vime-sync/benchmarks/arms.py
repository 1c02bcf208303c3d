"""One arm of the table a process: measures one thing, and writes what it found as JSON even if it fails half-way.

Times are wall times in milliseconds around an operation that ends with a device synchronisation. An arm that needs
servers starts them first and then waits at its *gate*: `gpu_table.py` lets several start side by side and measure one
after another, so that nothing else runs on the machine while one measures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from plane import kernel
from servers import Server
from setting import Record, Setting, clock, free_gib
from shapes import Trainer, config_of, make_trainer
from vime_sync import Publisher, SyncReport, SyncSession, engine_arguments
from vime_sync.digest import DigestMode


def _reports(
    record: Record, case: str, trainer: Trainer, publisher: Publisher, session: SyncSession, first: int, times: int
) -> int:
    """Run updates, write their phases; the next version."""
    reports: list[SyncReport] = []
    stages, totals = [], []
    for version in range(first, first + times):
        trainer.flat[:1].mul_(1)
        started = time.perf_counter()
        publisher.stage(version)
        staged = time.perf_counter()
        reports.append(session.update(version))
        stages.append((staged - started) * 1e3)
        totals.append((time.perf_counter() - staged) * 1e3)
    kept = reports[1:]
    for phase in kept[0].phases:
        size = trainer.source.nbytes if phase == "copy" else 0
        record.row(f"{case}: {phase}", [r.phases[phase] * 1e3 for r in kept], size)
    record.row(f"{case}: trainer's stage", stages[1:])
    record.row(f"{case}: update, all of it", totals[1:], reports[-1].bytes, digest=reports[-1].digest)
    return first + times


def _load(server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        server.generate(tokens=256)


def copy(setting: Setting, *, trainer_on: int, engine_on: int) -> None:
    """A trainer process and a vLLM server: planned copies over IPC (shared memory on a CPU)."""
    record, gpu = setting.record, torch.cuda.is_available()
    device = torch.device("cuda", trainer_on) if gpu else torch.device("cpu")
    with setting.server(engine_arguments(weights="dummy"), device=engine_on) as server:
        record.note(start_seconds=round(server.start_seconds, 1))
        setting.ready()
        trainer = make_trainer(setting.shape, device)
        publisher = Publisher(trainer.source, "ipc" if gpu else "shm", digest="full")
        before = free_gib(engine_on)
        session = _connect(record, "", SyncSession([server.url], publisher.manifest(), deadline_s=120, mode="direct"))
        version = 1
        modes: tuple[DigestMode, ...] = ("full", "sampled", "off")
        for mode in modes:
            publisher.digest = mode
            version = _reports(record, f"digest {mode}", trainer, publisher, session, version, 10)
        record.note(extra_idle_gib=round(before - free_gib(engine_on), 3))
        version = _under_load(
            server,
            lambda first: _reports(record, "under load, digest off", trainer, publisher, session, first, 6),
            version,
        )

        def sync(to: int, seed: int) -> None:
            trainer.fill(seed)
            publisher.stage(to)
            session.update(to)

        version = _change(record, server, sync, version)
        session.close()
        other = SyncSession([server.url], publisher.manifest(), deadline_s=120, mode="direct", copier="torch")
        _reports(record, "copier torch, digest off", trainer, publisher, _connect(record, "torch_", other), version, 8)
        other.close()
        publisher.close()


def _connect(record: Record, prefix: str, session: SyncSession) -> SyncSession:
    started = time.perf_counter()
    plan = session.connect()[0]
    took = round((time.perf_counter() - started) * 1e3, 1)
    record.note(**{f"{prefix}connect_ms": took, f"{prefix}plan": {**plan, "ignored": len(plan["ignored"])}})
    return session


def _under_load(server: Server, measure: Callable[[int], int], version: int) -> int:
    """Measure while 16 requests are being generated; the next version. A load that broke off is no load: it raises."""
    stop = threading.Event()
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(_load, server, stop) for _ in range(16)]
        try:
            time.sleep(2)
            version = measure(version)
        finally:
            stop.set()
        for stream in streams:
            stream.result(60)
    return version


def _change(record: Record, server: Server, sync: Callable[[int, int], Any], version: int) -> int:
    """Other weights give other tokens; the first weights give the first tokens again, exactly. The next version."""
    seen = []
    for step, seed in enumerate((1, 2, 1)):
        sync(version + step, seed)
        seen.append(server.generate())
    record.note(changed=seen[0] != seen[1], restored_exactly=seen[0] == seen[2])
    return version + 3


def _speed(server: Server) -> float:
    """Tokens a second of many equal requests."""
    streams, tokens = (64, 256) if torch.cuda.is_available() else (4, 8)
    started = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        made = sum(len(found["tokens"]) for found in pool.map(lambda _: server.generate(tokens), range(streams)))
    return round(made / (time.perf_counter() - started), 1)


def _compare_speed(record: Record, aliased: Server, plain: Server, rounds: int = 4) -> None:
    """Rollout speed of two servers on one device, in turns, so that whatever drifts drifts for both."""
    rates: dict[str, list[float]] = {"aliased": [], "plain": []}
    for turn in range(rounds + 1):
        for name, server in (("aliased", aliased), ("plain", plain)):
            rate = _speed(server)
            if turn:  # the first turn warms up
                rates[name].append(rate)
    middle = {name: statistics.median(found) for name, found in rates.items()}
    record.note(tokens_per_s=rates, speed_ratio=round(middle["aliased"] / middle["plain"], 4))


def alias(setting: Setting) -> None:
    """An engine that runs on the trainer's memory, captured graphs on, and beside it one with weights of its own."""
    record, gpu = setting.record, torch.cuda.is_available()
    trainer = make_trainer(setting.shape, torch.device("cuda", 0) if gpu else torch.device("cpu"))
    publisher = Publisher(trainer.source, "ipc" if gpu else "shm", digest="off")
    publisher.stage(0)
    manifest = publisher.manifest()
    path = setting.work / "manifest.json"
    path.write_text(json.dumps(manifest))
    with ExitStack() as stack:
        server = setting.server(engine_arguments(weights="alias", manifest=path), graphs=True)
        stack.callback(server.stop)
        plain = setting.server(engine_arguments(weights="dummy"), graphs=True)
        stack.callback(plain.stop)
        for name, one in (("aliased", server), ("plain", plain)):
            one.wait()
            facts = {"start_seconds": round(one.start_seconds, 1), "memory": one.grep("Model loading took")}
            record.note(**{f"{name}_{key}": value for key, value in facts.items()})
        setting.ready()
        session = _connect(record, "", SyncSession([server.url], manifest, deadline_s=60))
        record.note(state=session.states()[0])
        version = 1
        modes: tuple[DigestMode, ...] = ("off", "full")
        for mode in modes:
            publisher.digest = mode
            version = _writes(record, f"idle, digest {mode}", publisher, session, version, 22)
        publisher.digest = "off"
        version = _under_load(
            server, lambda first: _writes(record, "under load", publisher, session, first, 12), version
        )
        version = _change(
            record, server, lambda v, seed: _write(publisher, session, v, lambda: trainer.fill(seed)), version
        )
        _compare_speed(record, server, plain)
        session.close()
        _copies(record, trainer, publisher, plain, version)
    publisher.close(force=True)


def _copies(record: Record, trainer: Trainer, publisher: Publisher, plain: Server, version: int) -> None:
    """Planned copies into the server that has weights of its own, in the same run; its graphs are captured."""
    manifest = publisher.manifest()
    session = _connect(record, "copy_", SyncSession([plain.url], manifest, deadline_s=60, mode="direct"))
    modes: tuple[DigestMode, ...] = ("full", "sampled", "off")
    for mode in modes:
        publisher.digest = mode
        version = _reports(record, f"copy, digest {mode}", trainer, publisher, session, version, 16)
    session.close()


def _write(publisher: Publisher, session: SyncSession, version: int, step: Callable[[], None]) -> SyncReport:
    with session.writing(version) as written, publisher.writing(version):
        step()
    assert written.report is not None
    return written.report


def _writes(record: Record, case: str, publisher: Publisher, session: SyncSession, first: int, times: int) -> int:
    """Empty writes: what the pause costs by itself."""
    walls, reports = [], []
    for version in range(first, first + times):
        started = time.perf_counter()
        reports.append(_write(publisher, session, version, lambda: None))
        walls.append((time.perf_counter() - started) * 1e3)
    for phase in reports[-1].phases:
        record.row(f"{case}: {phase}", [r.phases[phase] * 1e3 for r in reports[2:]])
    record.row(f"{case}: writing block, all of it", walls[2:], bytes=reports[-1].bytes, digest=reports[-1].digest)
    return first + times


def _hf_model(shape: str, folder: Path, device: torch.device) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, config_of(shape)["dtype"]))
    made: torch.nn.Module = model.to_empty(device=device)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.02)
    return made


def vllm_engine(setting: Setting, *, backend: str, engine_on: int) -> None:
    """Measure the weight-transfer engines of vLLM itself, on the same shape."""
    arguments = ["--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": backend})]
    server = setting.server(arguments, device=engine_on, plugin=False)
    with ExitStack() as stack:
        stack.callback(server.stop)
        from vllm.distributed.weight_transfer.base import ModuleSource  # while the server starts
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        server.wait()
        setting.record.note(start_seconds=round(server.start_seconds, 1))
        setting.ready()
        model = _hf_model(setting.shape, Path(server.model), torch.device("cuda", 0))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        info: Any = (
            IPCTrainerInitInfo(rank=0, packed=False)
            if backend == "ipc"
            else NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=29777, world_size=2)
        )
        client, source = HTTPVLLMWeightSyncClient(server.url), ModuleSource(model)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        times = clock(engine.send_weights, 8, warm=2)
        setting.record.row(f"vLLM {backend}: send_weights, all of it", times, size)
        seen = server.generate()
        setting.record.note(tokens_after=seen["tokens"][:6])


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arm")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True, help="where servers' logs go if the arm fails")
    parser.add_argument("--gate", type=Path, help="a folder: wait in it for the arm's turn")
    parser.add_argument("--eager", action="store_true", help="capture no graphs")
    options = parser.parse_args()
    record = Record(options.out, options.arm, options.shape)
    gpu = torch.cuda.is_available()
    zero = torch.device("cuda", 0) if gpu else torch.device("cpu")
    one = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else zero
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        setting = Setting(record, options.shape, Path(name), options.gate, options.eager)
        arms: dict[str, Callable[[], None]] = {
            "kernel": lambda: kernel(setting, zero, zero, sweep=False),
            "tune": lambda: kernel(setting, zero, zero, sweep=True),
            "kernel-peer": lambda: kernel(setting, zero, one, sweep=False),
            "tune-peer": lambda: kernel(setting, zero, one, sweep=True),
            "copy": lambda: copy(setting, trainer_on=0, engine_on=0),
            "copy-peer": lambda: copy(setting, trainer_on=0, engine_on=1),
            "alias": lambda: alias(setting),
            "vllm-ipc": lambda: vllm_engine(setting, backend="ipc", engine_on=0),
            "vllm-nccl": lambda: vllm_engine(setting, backend="nccl", engine_on=1),
        }
        try:
            arms[options.arm]()
        except BaseException as error:  # whatever ended it is said in the JSON, beside the rows that were measured
            record.fail(f"{type(error).__name__}: {error}"[:2000])
            options.logs.mkdir(parents=True, exist_ok=True)
            for log in setting.work.glob("server-*.log"):
                shutil.copy(log, options.logs / f"{options.arm}-{log.name}")
            raise


if __name__ == "__main__":
    main()
