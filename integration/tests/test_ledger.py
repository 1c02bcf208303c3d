"""The ledger of prompts survives a crash and a resume as the metrics do."""

from __future__ import annotations

import os

import torch
from vime_integration.gauges import process_gauges
from vime_integration.ledger import Ledger, LedgerEntry, read_ledger
from vime_sync import shared_empty


def test_a_resume_keeps_exactly_the_steps_before_it(tmp_path):
    path = tmp_path / "prompts.jsonl"
    with Ledger(path) as ledger:
        for step in (1, 2, 3):
            ledger.write(step, LedgerEntry([step], [(step + 10, "dull")], [(step + 20, "lost")]))
    with path.open("a") as file:
        file.write('{"step": 4, "trai')  # the crash
    with Ledger(path, resume_step=2) as resumed:
        resumed.write(3, LedgerEntry([30]))
    rows = read_ledger(path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1] == {"step": 2, "trained": [2], "dropped": [[12, "dull"]], "replayed": [[22, "lost"]]}
    assert rows[2]["trained"] == [30]
    assert LedgerEntry.from_dict(rows[1]) == LedgerEntry([2], [(12, "dull")], [(22, "lost")])


def test_a_fresh_run_begins_an_empty_ledger(tmp_path):
    path = tmp_path / "prompts.jsonl"
    with Ledger(path) as ledger:
        ledger.write(1, LedgerEntry([1]))
    Ledger(path).close()
    assert read_ledger(path) == []


def test_gauges_sum_over_a_role_and_leave_out_the_dead():
    metrics = process_gauges({"driver": [os.getpid(), 2**22 - 3]})
    assert metrics["proc/driver_rss_mib"] > 10
    assert metrics["proc/driver_fds"] >= 3
    assert metrics["proc/driver_threads"] >= 1
    before = metrics["proc/shm_segments"]
    segment = shared_empty(8, torch.float32)
    assert process_gauges({"driver": [os.getpid()]})["proc/shm_segments"] == before + 1
    del segment
