"""The small parts: errors on the wire, start-up arguments, who lives, what is swept, the vLLM window, the 503 guard."""

import json
import subprocess
import sys

import numpy as np
import pytest
from vime_sync import errors
from vime_sync.agree import Share, divide
from vime_sync.control import SHM, ControlBlock, Segment, segment_name, sweep
from vime_sync.digest import Digest
from vime_sync.errors import (
    StaleSourceError,
    SyncError,
    TransactionError,
    TransportError,
    from_wire,
    to_wire,
)
from vime_sync.launch import engine_arguments, engine_environment
from vime_sync.process import identity, is_dead
from vime_sync.vllm_plugin.guard import ServeGuard


@pytest.mark.parametrize("name", [n for n in dir(errors) if n.endswith("Error") and n != "VimeError"])
def test_every_error_survives_the_wire(name):
    kind = getattr(errors, name)
    sent = kind("what", where="here", seen="1", expected="2", fix="try")
    got = from_wire(json.loads(json.dumps(to_wire(sent))), where="http://engine")
    assert type(got) is kind
    assert (got.what, got.where, got.seen, got.expected, got.fix) == ("what", "http://engine: here", "1", "2", "try")
    assert issubclass(kind, SyncError)


@pytest.mark.parametrize("record", [{}, {"error": "NoSuchError", "what": "w"}, {"error": 3, "where": None}])
def test_an_unknown_error_keeps_its_text(record):
    got = from_wire(record)
    assert type(got) is SyncError
    assert got.what == record.get("what", "an engine reported an error without a text")


def test_the_plugin_is_added_to_an_allow_list_and_replaces_none():
    assert engine_environment({}) == {"VLLM_PLUGINS": "vime_sync"}
    assert engine_environment({"VLLM_PLUGINS": "other,vime_sync"}) == {"VLLM_PLUGINS": "other,vime_sync"}
    arguments = engine_arguments(weights="dummy")
    assert json.loads(arguments[arguments.index("--weight-transfer-config") + 1]) == {"backend": "vime"}
    assert json.loads(arguments[arguments.index("--model-loader-extra-config") + 1]) == {"weights": "dummy"}


@pytest.fixture(scope="module")
def killed():
    """What a process said of itself before it ended without cleaning up: its identity and its segment."""
    code = (
        "import json, os; from vime_sync.control import Segment, segment_name; from vime_sync.process import identity\n"
        "s = Segment(segment_name(), 64, create=True); print(json.dumps([identity(), s.name]), flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return json.loads(done.stdout)


def test_life_is_judged_only_where_it_can_be(killed):
    me = identity()
    assert not is_dead(me)
    assert is_dead({**me, "start": me["start"] - 1})  # the pid was reused
    assert not is_dead({**me, "namespace": "another host"})
    assert not is_dead(None)
    assert not is_dead({**me, "pid": "x"})
    assert is_dead(killed[0])


def test_what_a_killed_process_left_is_swept_and_nothing_else(killed):
    left = SHM / killed[1]
    mine = Segment(segment_name(), 64, create=True)
    sweep()
    assert not left.exists()
    assert (SHM / mine.name).exists()
    mine.close()
    assert not (SHM / mine.name).exists()


def test_segments_are_checked():
    with pytest.raises(TransportError, match="not a segment name of ours"):
        Segment("../etc/passwd", 1, create=False)
    with pytest.raises(StaleSourceError, match="gone"):
        Segment("vime-nobody", 1, create=False)
    block = ControlBlock(segment_name(), 2, create=True)
    with pytest.raises(StaleSourceError, match=r"not the control block|truncated"):
        ControlBlock(block.name, 3000, create=False)
    with pytest.raises(StaleSourceError, match="not the control block"):
        ControlBlock(block.name, 1, create=False)
    block.begin()
    block.finish(4, "full", 4, np.array([[1, 2], [2**64 - 1, 5]], dtype=np.uint64))
    reader = ControlBlock(block.name, 2, create=False)
    assert reader.check(4, where="rank 0") == 2
    assert reader.digests() == ("full", 4, [Digest(1, 2), Digest(2**64 - 1, 5)])
    block.close()
    with pytest.raises(StaleSourceError, match="closed"):
        reader.check(4, where="rank 0")


def test_every_slice_is_counted_by_one_worker():
    norm, left, right = ("n", (0,), (4,), (4,)), ("w", (0, 0), (2, 4), (4, 4)), ("w", (2, 0), (2, 4), (4, 4))
    partial = ("p", (0,), (2,), (4,))
    shares = divide({0: [norm, left, partial], 1: [norm, right]})
    assert shares == {"skipped": {"0": [], "1": [0]}, "verified": ["n", "w"]}
    assert Share.from_wire(shares, 1).skipped == {0}
    assert not Share.from_wire(shares, 1).local
    with pytest.raises(TransactionError, match="malformed"):
        Share.from_wire({"skipped": 3}, 0)


def test_slices_that_overlap_and_leave_a_hole_as_large_are_not_vouched_for():
    left, right, other = ("w", (0, 0), (4, 3), (4, 4)), ("w", (0, 2), (4, 1), (4, 4)), ("w", (0, 3), (4, 1), (4, 4))
    assert divide({0: [left], 1: [right]})["verified"] == []
    assert divide({0: [left], 1: [other]})["verified"] == ["w"]


class State:
    """What the guard looks at."""


@pytest.mark.parametrize(
    ("path", "method", "passes"),
    [
        ("/v1/chat/completions", "POST", False),
        ("/inference/v1/generate", "POST", False),
        ("/resume", "POST", False),
        ("/pause", "POST", True),
        ("/vime/update", "POST", True),
        ("/health", "GET", True),
    ],
)
async def test_a_torn_engine_lets_only_harmless_requests_through(path, method, passes):
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(scope["path"])

    async def send(message):
        sent.append(message)

    state = State()
    guard = ServeGuard(app, state)
    scope = {"type": "http", "method": method, "path": path}
    await guard(scope, None, send)
    assert seen == [path]  # nothing is torn, and no transaction is there yet
    state.vime_sync = State()
    state.vime_sync.refusal = "version 3 failed while it was being written"
    await guard(scope, None, send)
    assert (len(seen) == 2) == passes
    if not passes:
        assert sent[0]["status"] == 503
        assert json.loads(sent[1]["body"])["error"] == "TornEngineError"


def test_buffers_in_flux_or_of_a_closed_publisher_hold_no_version():
    block = ControlBlock(segment_name(), 0, create=True)
    none = np.zeros((0, 2), dtype=np.uint64)
    seen = [block.at_rest()]
    for step in (block.begin, lambda: block.finish(3, "off", 0, none), block.begin, block.begin):
        step()
        seen.append(block.at_rest())
    block.finish(4, "off", 0, none)
    seen.append(block.at_rest())
    block.close()
    assert [*seen, block.at_rest()] == [-1, -1, 3, -1, -1, 4, -1]
