"""The memory report: phases, what is away, and the device's peaks by a stand-in for its allocator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from vime_megatron import sft_loss
from vime_megatron.metrics import MemoryMeter, resident_bytes


def test_every_phase_that_ran_is_reported(make_trainer, tiny, batch, tmp_path):
    trainer = make_trainer(tiny, dtype="bfloat16")
    assert {"host_gib", "host_gib.start", "offloaded_gib", "pinned_gib"} == trainer.memory().keys()
    trainer.step(batch, sft_loss)
    trainer.logprobs(batch)
    trainer.save(tmp_path / "saved")
    trainer.load(tmp_path / "saved")
    trainer.export_hf(tmp_path / "hf")
    out = trainer.offload()
    away = trainer.memory()
    assert away["offloaded_gib"] == pytest.approx(out.bytes_copied / 2**30)
    assert away["pinned_gib"] == pytest.approx(out.pinned_bytes / 2**30)
    trainer.onload()
    report = trainer.memory()
    phases = {"start", "train", "update", "logprobs", "save", "load", "export", "offload", "onload"}
    assert {name.partition(".")[2] for name in report if name.startswith("host_gib.")} == phases
    assert report["offloaded_gib"] == 0.0
    assert all(isinstance(value, float) for value in report.values())
    assert 0.01 < report["host_gib.train"] < 100


def test_resident_bytes_are_the_kernel_s():
    status = Path("/proc/self/status").read_text()
    kilobytes = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])
    assert resident_bytes() == pytest.approx(1024 * kilobytes, rel=0.5)


def test_a_device_s_peaks_are_those_of_the_phase(monkeypatch):
    """The allocator is faked: its peak starts anew at every reset, and a phase keeps the highest of its own."""
    now = {"allocated": 0, "peak": 0}

    def allocate(count):
        now["allocated"] += count
        now["peak"] = max(now["peak"], now["allocated"])

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(peak=now["allocated"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now["peak"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    meter = MemoryMeter(torch.device("cuda", 0))
    with meter.phase("train"):
        allocate(6 << 30)
        allocate(-(4 << 30))
    with meter.phase("update"):
        allocate(1 << 30)
    with pytest.raises(ZeroDivisionError), meter.phase("train"):
        raise ZeroDivisionError
    report = meter.report()
    assert report["device_peak_gib.train"] == 6.0
    assert report["device_peak_gib.update"] == 3.0
    assert (report["device_gib"], report["device_reserved_gib"], report["device_free_gib"]) == (3.0, 8.0, 100.0)
