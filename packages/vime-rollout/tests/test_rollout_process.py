"""Processes under a warden: nothing of a tree survives its owner, however the owner ends. Real processes throughout."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from vime_rollout import EngineConfig
from vime_rollout.engine import warden
from vime_rollout.engine.ports import held_port
from vime_rollout.engine.process import EngineProcess
from vime_rollout.engine.scratch import make_scratch
from vime_rollout.errors import EngineStartError

#: A tree of four: a parent that ignores SIGTERM, its resource tracker, a child in a session of its own, and an orphan
#: that the child left. The parent has a socket and a meeting point in its temporary folder, shared memory of two kinds
#: and a semaphore, as vLLM has.
TREE = """
import multiprocessing, os, signal, socket, subprocess, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(tempfile.gettempdir(), "x" * 36))
_, meeting = tempfile.mkstemp(prefix="vllm_dist_")
workers = os.path.basename(meeting) + "-tp:0-[0-1]-cpushm_0"
open("/dev/shm/" + workers, "w").close()
segment = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
child = f"import subprocess, sys; subprocess.Popen({sleep!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", child], check=True)
subprocess.Popen(sleep, start_new_session=True)
print("up", segment.name, "sem." + lock._semlock.name[1:], workers, flush=True)
time.sleep(300)
"""


def start(tmp_path, code, grace_s=0.3):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return EngineProcess(command, dict(os.environ), tmp_path / "log", grace_s=grace_s, name="e")


def until(condition, limit=15.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.02)


def alive(pids):
    def lives(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended before it was looked at, or between the looks
            return False

    return [pid for pid in pids if lives(pid)]


def shared(log):
    """Return the shared memory that ``TREE`` has made, as its log names it, and that is there."""
    names = re.search(r"^up (\S+) (\S+) (\S+)$", log.read_text(), re.MULTILINE)
    return [path for name in names.groups() if (path := Path("/dev/shm", name)).exists()]


def grown(tmp_path):
    """Start ``TREE`` and return it with its members by role."""
    process = start(tmp_path, TREE)
    until(lambda: "up" in process.log_tail())
    (warden,) = (p.pid for p in psutil.Process(process.pid).children() if "warden.py" in " ".join(p.cmdline()))
    (command,) = (p.pid for p in psutil.Process(warden).children() if "SIG_IGN" in p.cmdline()[-1])
    members = process.members()
    assert len(members) == 6
    assert len(shared(process.log_path)) == 3
    assert any(path.is_socket() for path in process.scratch.iterdir())
    return process, {"keeper": process.pid, "warden": warden, "command": command}, members


@pytest.mark.parametrize("forced", [False, True])
def test_stop_ends_the_whole_tree(tmp_path, forced):
    process, _, members = grown(tmp_path)
    assert process.stop(forced=forced) == 128 + signal.SIGKILL
    assert alive(members) == []
    assert process.members() == []
    assert not process.scratch.exists()
    assert shared(process.log_path) == []
    assert process.stop() == 128 + signal.SIGKILL


def test_a_forced_end_does_not_wait_for_manners(tmp_path):
    code = """
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, lambda *_: (Path("told").touch(), sys.exit(0)))
        print("up", flush=True)
        time.sleep(300)
    """
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(code)]
    for forced in (True, False):
        process = EngineProcess(command, dict(os.environ), tmp_path / f"{forced}.log", grace_s=60.0, name="e")
        until(lambda process=process: "up" in process.log_tail())
        assert process.stop(forced=forced) == (128 + signal.SIGKILL if forced else 0)
        assert (tmp_path / "told").exists() is not forced


@pytest.mark.parametrize("victims", [["command"], ["keeper"], ["warden"], ["keeper", "command"], ["warden", "command"]])
def test_the_tree_ends_when_one_of_its_guards_or_its_command_is_killed(tmp_path, victims):
    process, roles, members = grown(tmp_path)
    for victim in victims:
        os.kill(roles[victim], signal.SIGKILL)
    until(lambda: alive(members) == [])
    assert process.wait(15) == 128 + signal.SIGKILL
    until(lambda: not process.scratch.exists())  # nobody had to ask for it
    assert shared(process.log_path) == []
    process.stop()


def test_stop_waits_for_the_warden_when_the_keeper_is_gone(tmp_path):
    process, roles, members = grown(tmp_path)
    os.kill(roles["keeper"], signal.SIGKILL)
    assert process.stop() == 128 + signal.SIGKILL
    assert alive(members) == []


def test_a_frozen_command_is_ended_too(tmp_path):
    process, roles, members = grown(tmp_path)
    os.kill(roles["command"], signal.SIGSTOP)
    assert process.stop(forced=True) == 128 + signal.SIGKILL
    assert alive(members) == []


OWNER = """
    import os, signal, sys, time
    from pathlib import Path
    from vime_rollout.engine.process import EngineProcess
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    log = Path(sys.argv[1])
    process = EngineProcess([sys.executable, "-c", sys.argv[2]], dict(os.environ), log, grace_s=0.2, name="e")
    while "up" not in process.log_tail():
        time.sleep(0.02)
    if sys.argv[3] == "forks" and os.fork() == 0:
        time.sleep(300)  # with the pipe that the warden reads from
    print(process.scratch, *process.members(), flush=True)
    time.sleep(300)
"""


@pytest.fixture
def owner(tmp_path, request):
    """A process that owns ``TREE``, and the members of the tree; whatever is done to it, nothing may be left."""
    how = getattr(request, "param", "")
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path / "log"), TREE, how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    scratch, *words = parent.stdout.readline().split()
    members = [int(p) for p in words]
    assert len(alive(members)) == 6
    assert len(shared(tmp_path / "log")) == 3
    yield parent, members
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    until(lambda: alive(members) == [])
    until(lambda: not Path(scratch).exists())
    assert shared(tmp_path / "log") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_tree_ends_with_its_owner(owner, number):
    parent, members = owner
    parent.send_signal(number)
    parent.wait(10)
    until(lambda: alive(members) == [])


@pytest.mark.parametrize("owner", ["forks"], indirect=True)
def test_a_fork_of_the_owner_does_not_keep_the_tree(owner):
    parent, members = owner
    (fork,) = (process for process in psutil.Process(parent.pid).children() if process.pid not in members)
    parent.kill()
    parent.wait(10)
    try:
        until(lambda: alive(members) == [])
        assert alive([fork.pid]) == [fork.pid]
    finally:
        fork.kill()


def test_an_owner_that_is_gone_before_the_keeper_runs_is_missed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    command = [sys.executable, "-P", "-S", warden.__file__, str(gone.pid), "0", str(tmp_path / "none")]
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    with subprocess.Popen([*command, *sleep], stdin=subprocess.PIPE) as keeper:  # the pipe stays open, as in a fork
        try:
            assert keeper.wait(30) == 128 + signal.SIGKILL
        finally:
            keeper.kill()


@pytest.mark.parametrize("owner_goes", ["first", "last", "not at all"])
def test_the_tree_ends_when_the_owner_s_direct_children_are_killed(owner, owner_goes):
    """As frameworks do that clean up behind their workers; those that left the session are found as well."""
    parent, members = owner
    children = psutil.Process(parent.pid).children()
    assert len(children) == 1
    if owner_goes == "first":
        parent.kill()
    for child in children:
        child.kill()
    if owner_goes == "last":
        parent.kill()
    until(lambda: alive(members) == [])


def test_the_tree_is_swept_when_both_guards_were_killed(tmp_path):
    process, roles, members = grown(tmp_path)
    session = [p for p in members if os.getsid(p) == process.pid]
    for role in ("keeper", "warden"):  # neither may act on the other's end
        os.kill(roles[role], signal.SIGSTOP)
    for role in ("keeper", "warden"):
        os.kill(roles[role], signal.SIGKILL)
    until(lambda: alive([roles["command"]]) == [])  # by itself
    process.stop()
    assert not process.scratch.exists()
    assert shared(process.log_path) == []
    until(lambda: alive(session) == [])
    for pid in alive(members):  # those that left the session and lost both parents are beyond reach: end them here
        os.kill(pid, signal.SIGKILL)


def test_the_end_is_described_with_cause_and_tail(tmp_path):
    code = """
        import sys
        print("(EngineCore pid=7) ERROR 11-29 [core.py:1] ValueError: no kernel for head size 7", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(3)
    """
    process = start(tmp_path, code)
    assert process.wait(10) == 3
    text = process.describe_end(3)
    assert text.startswith("exit code 3, ValueError: no kernel for head size 7; last lines of")
    assert "See root cause above" in text
    assert "SIGSEGV" in process.describe_end(128 + signal.SIGSEGV)
    process.stop()


def test_the_cause_is_found_above_the_tracebacks_of_all_requests(tmp_path):
    code = """
        print("(EngineCore pid=7) ERROR 11-29 [core.py:1] RuntimeError: CPU Generator does not use offset")
        for _ in range(20000):
            print("(APIServer pid=6) ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    """
    process = start(tmp_path, code)
    process.wait(10)
    assert process.log_cause() == "RuntimeError: CPU Generator does not use offset"
    process.stop()


def test_a_restart_does_not_tell_of_the_run_before(tmp_path):
    first = start(tmp_path, "raise ValueError('old')")
    first.wait(10)
    second = start(tmp_path, "print('new')")
    second.wait(10)
    assert first.log_cause() == "ValueError: old"
    assert second.log_cause() == ""
    assert second.log_tail() == "new"
    first.stop()
    second.stop()


@pytest.fixture
def short():
    """A temporary folder with a path short enough for what vLLM puts below it; pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_what_is_shared_stays_where_it_was(short):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder, environment = make_scratch({"A": "1", "TMPDIR": str(short)}, name="e")
    assert folder.parent == short
    assert (environment["A"], environment["TMPDIR"], environment["RAY_TMPDIR"]) == ("1", str(folder), str(short))
    assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]) == short / Path(default_cache_dir()).name
    assert next(iter(environment)) == "A"  # see make_scratch
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/cache", "RAY_TMPDIR": "/ray", "TMPDIR": str(short)}
    other, environment = make_scratch(mine, name="e")
    assert other != folder
    assert environment == mine | {"TMPDIR": str(other)}


def test_a_temporary_folder_that_cannot_be_used_is_told_before_anything_starts(short):
    deep = short / ("d" * 60)
    deep.mkdir()
    with pytest.raises(EngineStartError, match="too long for unix sockets"):
        make_scratch({"TMPDIR": str(deep)}, name="e")
    assert list(deep.iterdir()) == []
    folder, _ = make_scratch({"TMPDIR": str(deep), "VLLM_RPC_BASE_PATH": str(short)}, name="e")
    assert folder.parent == deep
    with pytest.raises(EngineStartError, match="no temporary folder"):
        make_scratch({"TMPDIR": str(short / "none")}, name="e")


def test_a_log_that_cannot_be_written_leaves_no_temporary_folder(short, tmp_path):
    with pytest.raises(IsADirectoryError):
        EngineProcess(["true"], os.environ | {"TMPDIR": str(short)}, tmp_path, grace_s=0.0, name="e")
    assert list(short.iterdir()) == []


def test_a_busy_port_names_who_has_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(EngineStartError, match="busy") as caught, held_port("127.0.0.1", port, "e"):
            pytest.fail("it is another's")
    assert f"process {os.getpid()}" in caught.value.seen
    with held_port("127.0.0.1", port, "e") as held:
        assert held == port


def test_a_held_port_is_its_servers_and_nobody_elses():
    with held_port("127.0.0.1", 0, "e") as port, held_port("127.0.0.1", 0, "f") as other, socket.socket() as stranger:
        assert port != other
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port), 30):
            pass


def test_configuration_becomes_command_and_environment(tmp_path):
    config = EngineConfig(model="/m", name="e", arguments=("--x", "1"), environment={"A": "1", "HOME": None})
    command = config.command(8001)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--x", "1"]
    assert "--enable-scale-out" in command
    assert command[command.index("--port") + 1] == "8001"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--gpu-memory-utilization" not in command
    environment = config.child_environment({"HOME": "/h", "B": "2"})
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert (environment["A"], environment["B"]) == ("1", "2")
    assert "HOME" not in environment


@pytest.mark.parametrize("content", [None, "{", "{}", '{"architectures": []}'])
def test_a_bad_model_folder_is_told_before_anything_starts(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineStartError, match="model folder"):
        EngineConfig(model=str(tmp_path)).check_model()
    with pytest.raises(EngineStartError, match="missing"):
        EngineConfig(model=str(tmp_path / "none")).check_model()
