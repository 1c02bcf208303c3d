"""Every row of FAULTS.md is caused again and compared; no row may ever show a mix of versions."""

import pytest
from sync_faults import SCENARIOS, TABLE, committed, render

ROWS = committed()


def test_the_table_lists_every_scene_and_nothing_else():
    assert list(ROWS) == list(SCENARIOS)
    assert render(ROWS) == TABLE.read_text(), "run `python packages/vime-sync/tests/sync_faults.py`"


@pytest.mark.parametrize("key", SCENARIOS, ids=lambda key: f"{key[0].split(' (')[0]}: {key[1]}")
def test_what_is_served_after_a_fault(key):
    row = SCENARIOS[key]()
    assert not {"MIXED", "MISLABELLED"} & set(row[1].replace("/", " ").split())
    assert row == ROWS.get(key)
