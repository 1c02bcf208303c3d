"""What lives when a process begins its work is not looked at again; what comes later is collected as ever."""

from __future__ import annotations

import gc
import weakref

from vime_integration.garbage import set_apart


class Ring:
    """Refers to itself, so that only the collector can take it away."""

    def __init__(self) -> None:
        """Close the ring."""
        self.own = self


def test_later_garbage_is_collected_and_what_was_there_is_left_alone():
    kept = Ring()
    try:
        set_apart()
        assert gc.get_freeze_count() > 1000
        assert not any(found is kept for found in gc.get_objects())
        gone = weakref.ref(Ring())
        gc.collect()
        assert gone() is None
        assert kept.own is kept
    finally:
        gc.unfreeze()
