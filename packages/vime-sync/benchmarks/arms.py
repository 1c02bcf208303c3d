"""One arm of the table a process: measures one thing, and writes what it found as JSON even if it fails half-way.

Times are wall times in milliseconds around an operation that ends with a device synchronisation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import torch
from servers import Server
from shapes import Trainer, config_of, make_trainer, model_folder, piece_boxes
from vime_sync import Publisher, SyncReport, SyncSession, engine_arguments
from vime_sync.copying import Copier, Item, Mover
from vime_sync.digest import DigestMode, digest_box

GB = 1e9


class Record:
    """Rows of results, written to a file after each addition."""

    def __init__(self, path: Path, arm: str, shape: str) -> None:
        """Start a file."""
        self._path, self._data = path, {"arm": arm, "shape": shape, "rows": [], "notes": {}, "error": ""}

    def row(self, case: str, milliseconds: Iterable[float], nbytes: int = 0, **more: Any) -> None:
        """Add repeated timings of one case."""
        values = [round(v, 3) for v in milliseconds]
        best, middle = min(values), sorted(values)[len(values) // 2]
        row = {"case": case, "ms": values, "median_ms": middle, "min_ms": best, **more}
        if nbytes:
            row["gb_per_s"] = round(nbytes / GB / (middle / 1e3), 1)
        self._data["rows"].append(row)
        rate = f" {row['gb_per_s']} GB/s" if nbytes else ""
        print(f"  {case}: median {middle:.2f} ms, min {best:.2f}{rate} {more or ''}", flush=True)
        self.write()

    def note(self, **more: Any) -> None:
        """Add facts."""
        self._data["notes"] |= more
        print(f"  {more}", flush=True)
        self.write()

    def fail(self, text: str) -> None:
        """Say why the arm ended early."""
        self._data["error"] = text
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self._data, indent=1))


def clock(run: Callable[[], Any], times: int, *, warm: int = 2) -> list[float]:
    """Milliseconds of each of several runs."""
    result = []
    for index in range(warm + times):
        _synchronize()
        started = time.perf_counter()
        run()
        _synchronize()
        if index >= warm:
            result.append((time.perf_counter() - started) * 1e3)
    return result


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def free_gib(index: int = 0) -> float:
    """Free memory of a device, whoever uses the rest."""
    return round(torch.cuda.mem_get_info(index)[0] / 2**30, 3) if torch.cuda.is_available() else 0.0


def _items(trainer: Trainer, target: torch.Tensor) -> list[Item]:
    return [
        Item(
            trainer.source.view(region), target.as_strided(region.shape, region.strides, region.offset), box, full, name
        )
        for name, box, full, region in piece_boxes(trainer.source)
    ]


def _verify(record: Record, items: list[Item], mover: Mover, device: torch.device) -> None:
    """The kernel's copy is bitwise the source, and its digests are those that torch computes."""
    for item in items:
        item.target.zero_()
    digests = mover.run(digest="full", phase=0)
    equal = all(torch.equal(item.source.to(device), item.target) for item in items)
    chosen = [0, *range(1, min(12, len(items))), len(items) - 1]
    same = all(
        digests[i].from_tensor(digest_box(items[i].source, items[i].box, items[i].full, items[i].name)) == digests[i]
        for i in chosen
    )
    record.note(bitwise_equal=equal, digests_equal_torch=same, plain_slices=mover.plain, slices=len(items))


def kernel(record: Record, shape: str, source: torch.device, target: torch.device, *, sweep: bool) -> None:
    """The data plane alone: one process, no engine."""
    from vime_sync.kernels import Tuning

    trainer = make_trainer(shape, source)
    into = torch.zeros_like(trainer.flat, device=target)
    size = trainer.source.nbytes
    record.row("one copy of the whole buffer", clock(lambda: into.copy_(trainer.flat), 10), size)
    items = _items(trainer, into)
    copiers: tuple[Copier, ...] = ("torch", "triton")
    for copier in copiers:
        mover = Mover(items, target, copier)
        modes: tuple[DigestMode, ...] = ("off", "sampled", "full") if copier == "triton" else ("off",)
        for mode in modes:
            times = clock(lambda mover=mover, mode=mode: mover.run(digest=mode, phase=1), 15, warm=3)
            record.row(f"{copier}, digest {mode}", times, size)
        if copier == "triton":
            times = clock(lambda mover=mover: mover.run(digest="full", phase=1, write=False), 15, warm=3)
            record.row("triton, digest only", times, size)
            _verify(record, items, mover, target)
    if sweep:
        for block, blocks, warps in itertools.product((1024, 2048, 4096), (2, 8, 32), (4, 8)):
            tuned = Mover(items, target, "triton", tuning=Tuning(block, blocks, warps))
            for mode in ("off", "full"):
                times = clock(lambda mover=tuned, mode=mode: mover.run(digest=mode, phase=1), 7, warm=2)
                record.row(f"tuning {block}x{blocks} warps {warps}, digest {mode}", times, size)


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


def _load(server: Server, stop: threading.Event, streams: int) -> list[threading.Thread]:
    def loop() -> None:
        while not stop.is_set():
            try:
                server.generate(tokens=256)
            except httpx.HTTPError:
                return

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    return threads


def copy(record: Record, shape: str, work: Path, *, trainer_on: int, engine_on: int, memory: str) -> None:
    """A trainer process and a vLLM server: planned copies over IPC (shared memory on a CPU)."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", trainer_on) if gpu else torch.device("cpu")
    arguments = [*engine_arguments(weights="dummy"), "--enforce-eager", "--gpu-memory-utilization", memory]
    dtype = config_of(shape)["dtype"]
    with Server(model_folder(shape, work / shape), arguments, work=work, device=engine_on, dtype=dtype) as server:
        record.note(start_seconds=round(server.start_seconds, 1), free_before=free_gib(engine_on))
        trainer = make_trainer(shape, device)
        before = free_gib(engine_on)
        publisher = Publisher(trainer.source, "ipc" if gpu else "shm", digest="full")
        session = SyncSession([server.url], publisher.manifest(), deadline_s=120, mode="direct")
        started = time.perf_counter()
        plan = session.connect()[0]
        record.note(connect_ms=round((time.perf_counter() - started) * 1e3, 1), plan=plan)
        version = 1
        modes: tuple[DigestMode, ...] = ("full", "sampled", "off")
        for mode in modes:
            publisher.digest = mode
            version = _reports(record, f"digest {mode}", trainer, publisher, session, version, 8)
        record.note(extra_idle_gib=round(before - free_gib(engine_on), 3))
        stop = threading.Event()
        threads = _load(server, stop, 16)
        time.sleep(2)
        version = _reports(record, "under load, digest off", trainer, publisher, session, version, 6)
        stop.set()
        for thread in threads:
            thread.join(60)
        _change(record, server, lambda v, seed: (trainer.fill(seed), publisher.stage(v), session.update(v)), version)
        session.close()
        publisher.close()


def _change(record: Record, server: Server, sync: Callable[[int, int], Any], version: int) -> None:
    """Other weights give other tokens; the first weights give the first tokens again, exactly."""
    seen = []
    for step, seed in enumerate((1, 2, 1)):
        sync(version + step, seed)
        seen.append(server.generate())
    record.note(changed=seen[0] != seen[1], restored_exactly=seen[0] == seen[2])


GRAPHS = [
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}',
]


def _speed(record: Record, server: Server, streams: int = 64, tokens: int = 256) -> None:
    """Tokens a second of many equal requests; the first round warms up."""
    rates = []
    for _ in range(4):
        started = time.perf_counter()
        threads = [threading.Thread(target=server.generate, kwargs={"tokens": tokens}) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        rates.append(round(streams * tokens / (time.perf_counter() - started), 1))
    record.note(tokens_per_s=rates[1:], best_tokens_per_s=max(rates[1:]))


def _start(shape: str, work: Path, arguments: list[str], memory: str, dtype: str) -> Server:
    graphs = GRAPHS if torch.cuda.is_available() else ["--enforce-eager"]
    more = [*graphs, "--max-num-seqs", "64", "--gpu-memory-utilization", memory]
    return Server(model_folder(shape, work / shape), [*arguments, *more], work=work, dtype=dtype)


def plain_speed(record: Record, shape: str, work: Path, *, memory: str) -> None:
    """An engine with weights of its own, captured graphs on: what the aliased one is compared with."""
    with _start(shape, work, [*engine_arguments(weights="dummy")], memory, config_of(shape)["dtype"]) as server:
        record.note(start_seconds=round(server.start_seconds, 1), memory=server.grep("Model loading took"))
        _speed(record, server)


def alias(record: Record, shape: str, work: Path, *, memory: str) -> None:
    """An engine that runs on the trainer's memory, captured graphs on."""
    gpu = torch.cuda.is_available()
    trainer = make_trainer(shape, torch.device("cuda", 0) if gpu else torch.device("cpu"))
    publisher = Publisher(trainer.source, "ipc" if gpu else "shm", digest="off")
    publisher.stage(0)
    manifest = publisher.manifest()
    path = work / "manifest.json"
    path.write_text(json.dumps(manifest))
    before = free_gib()
    with _start(
        shape, work, engine_arguments(weights="alias", manifest=path), memory, config_of(shape)["dtype"]
    ) as server:
        record.note(start_seconds=round(server.start_seconds, 1), memory=server.grep("Model loading took"))
        record.note(engine_took_gib=round(before - free_gib(), 2))
        session = SyncSession([server.url], manifest, deadline_s=60)
        started = time.perf_counter()
        session.connect()
        record.note(connect_ms=round((time.perf_counter() - started) * 1e3, 1), state=session.states()[0])
        version = 1
        modes: tuple[DigestMode, ...] = ("off", "full")
        for mode in modes:
            publisher.digest = mode
            version = _writes(record, f"idle, digest {mode}", publisher, session, version, 12)
        publisher.digest = "off"
        stop = threading.Event()
        threads = _load(server, stop, 16)
        time.sleep(2)
        version = _writes(record, "under load", publisher, session, version, 8)
        stop.set()
        for thread in threads:
            thread.join(60)
        _change(record, server, lambda v, seed: _write(publisher, session, v, lambda: trainer.fill(seed)), version)
        _speed(record, server)
        session.close()
    publisher.close(force=True)


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


def vllm_engine(record: Record, shape: str, work: Path, *, backend: str, engine_on: int, memory: str) -> None:
    """Measure the weight-transfer engines of vLLM itself, on the same shape."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    folder = model_folder(shape, work / shape)
    arguments = ["--load-format", "dummy", "--enforce-eager", "--gpu-memory-utilization", memory]
    arguments += ["--weight-transfer-config", json.dumps({"backend": backend})]
    with Server(folder, arguments, work=work, device=engine_on, plugin=False) as server:
        model = _hf_model(shape, folder, torch.device("cuda", 0))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info: Any = IPCTrainerInitInfo(rank=0, packed=False)
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=29777, world_size=2)
        client, source = HTTPVLLMWeightSyncClient(server.url), ModuleSource(model)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        record.row(f"vLLM {backend}: send_weights, all of it", clock(engine.send_weights, 6, warm=1), size)


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arm")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory", default="0.3")
    options = parser.parse_args()
    record = Record(options.out, options.arm, options.shape)
    gpu = torch.cuda.is_available()
    zero = torch.device("cuda", 0) if gpu else torch.device("cpu")
    one = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else zero
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        work, shape, memory = Path(name), options.shape, options.memory
        arms: dict[str, Callable[[], None]] = {
            "kernel": lambda: kernel(record, shape, zero, zero, sweep=False),
            "tune": lambda: kernel(record, shape, zero, zero, sweep=True),
            "kernel-peer": lambda: kernel(record, shape, zero, one, sweep=False),
            "tune-peer": lambda: kernel(record, shape, zero, one, sweep=True),
            "copy": lambda: copy(record, shape, work, trainer_on=0, engine_on=0, memory=memory),
            "copy-peer": lambda: copy(record, shape, work, trainer_on=0, engine_on=1, memory=memory),
            "alias": lambda: alias(record, shape, work, memory=memory),
            "plain-speed": lambda: plain_speed(record, shape, work, memory=memory),
            "vllm-ipc": lambda: vllm_engine(record, shape, work, backend="ipc", engine_on=0, memory=memory),
            "vllm-nccl": lambda: vllm_engine(record, shape, work, backend="nccl", engine_on=1, memory=memory),
        }
        try:
            arms[options.arm]()
        except Exception as error:
            record.fail(f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
            raise SystemExit(1) from error


if __name__ == "__main__":
    main()
