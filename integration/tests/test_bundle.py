"""A bundle is whole or it is not there; what was there before is never touched."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vime_integration.bundle import BundleStore
from vime_integration.errors import BundleError, ResumeError


def fill_with(**files: bytes):
    def fill(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return fill


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "checkpoints", keep=2)


def test_what_was_written_is_read_back(store: BundleStore) -> None:
    store.write(3, {"version": 4, "data": {"position": 17}}, fill_with(trainer__rank0=b"weights"))
    bundle = store.latest()
    assert (bundle.step, bundle.state) == (3, {"version": 4, "data": {"position": 17}})
    assert (bundle.path / "trainer/rank0").read_bytes() == b"weights"


def test_the_newest_are_kept(store: BundleStore) -> None:
    for step in (2, 10, 4, 6):
        store.write(step, {}, fill_with(a=b"x"))
    assert store.steps() == [6, 10]


def test_writing_a_step_again_replaces_it(store: BundleStore) -> None:
    store.write(1, {"n": 1}, fill_with(a=b"old"))
    store.write(1, {"n": 2}, fill_with(a=b"new"))
    assert store.latest().state == {"n": 2}
    assert (store.latest().path / "a").read_bytes() == b"new"


def test_no_bundle_is_a_clear_error(store: BundleStore) -> None:
    with pytest.raises(ResumeError, match="before its first save"):
        store.latest()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: (path / "a").unlink(), "a: missing"),
        (lambda path: (path / "a").write_bytes(b"xyz"), "a: 3 bytes, recorded 6"),
        (lambda path: (path / "a").write_bytes(b"abcdeF"), "SHA-256 differs"),
        (lambda path: (path / "extra").write_bytes(b""), "extra: not in the record"),
        (lambda path: (path / "bundle.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "bundle.json").unlink(), "cannot be read"),
        (lambda path: (path / "bundle.json").write_text(json.dumps({"format": 99})), "format 99"),
    ],
)
def test_a_torn_bundle_is_refused_and_the_older_one_offered(store: BundleStore, damage, text: str) -> None:
    store.write(1, {}, fill_with(a=b"abcdef"))
    newest = store.write(2, {}, fill_with(a=b"abcdef"))
    damage(newest.path)
    with pytest.raises(ResumeError) as caught:
        store.latest()
    assert text in caught.value.seen
    assert "resume from step 1" in caught.value.fix
    assert store.open(1).step == 1


def test_an_error_while_filling_leaves_nothing_and_keeps_the_old(store: BundleStore) -> None:
    store.write(1, {}, fill_with(a=b"abc"))

    def broken(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        store.write(2, {}, broken)
    assert [path.name for path in store.root.iterdir()] == ["step-000001"]
    assert store.latest().step == 1


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_bundle(store: BundleStore) -> None:
    store.write(1, {"n": 1}, fill_with(a=b"abc"))
    program = (
        "import os, signal, sys; from pathlib import Path; from vime_integration.bundle import BundleStore\n"
        "def fill(folder):\n"
        "    (folder / 'half').write_bytes(b'1'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "BundleStore(Path(sys.argv[1]), keep=2).write(2, {}, fill)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store.root)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert store.steps() == [1]
    assert store.latest().state == {"n": 1}
    store.write(2, {"n": 2}, fill_with(a=b"abc"))  # the leftover of the killed writer is in nobody's way
    assert store.latest().state == {"n": 2}


@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "pruned"])
def test_a_kill_in_the_middle_of_a_removal_leaves_no_half_of_a_bundle(store: BundleStore, step: int) -> None:
    store.write(1, {}, fill_with(a=b"abc", b=b"def"))
    program = (
        "import os, shutil, signal, sys; from pathlib import Path; from vime_integration.bundle import BundleStore\n"
        "def half(folder, ignore_errors=False):\n"
        "    if Path(folder, 'b').exists():\n"
        "        Path(folder, 'b').unlink(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "shutil.rmtree = half\n"
        "BundleStore(Path(sys.argv[1]), keep=1).write(int(sys.argv[2]), {}, lambda d: (d / 'a').write_bytes(b'x'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store.root), str(step)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [store.open(standing).step for standing in store.steps()] == [step]
    store.write(3, {}, fill_with(a=b"x"))
    names = {path.name for path in store.root.iterdir()}
    assert names == {f"step-{step:06d}", "step-000003"}, "what the kill left under another name is gone"


def test_nothing_gets_a_bundles_name_before_it_is_on_the_disk(
    store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure would show cannot be had here: this is the order that POSIX asks of a durable rename."""
    flushed: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def flush(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def named(path: Path, target: Path) -> Path:
        left = [str(entry) for entry in (path, *path.rglob("*")) if entry.stat().st_ino not in flushed]
        assert left == [], "not flushed before the rename"
        flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", named)
    bundle = store.write(1, {}, fill_with(trainer__rank0=b"weights", a=b"x"))
    assert {path.name for path in bundle.path.rglob("*")} == {"trainer", "rank0", "a", "bundle.json"}
    assert flushed == {store.root.stat().st_ino}, "the name itself is flushed afterwards"


def test_a_write_that_the_system_cuts_short_is_reported(store: BundleStore) -> None:
    """RLIMIT_FSIZE makes the kernel refuse a long write, without any special rights."""
    store.write(1, {}, fill_with(a=b"abc"))
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from vime_integration.bundle import BundleStore; from vime_integration.errors import BundleError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: BundleStore(Path(sys.argv[1]), keep=2).write(2, {}, lambda d: (d / 'a').write_bytes(b'x' * 65536))\n"
        "except BundleError as error: print(error)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.root)], timeout=60, capture_output=True, text=True, check=True
    )
    assert "the checkpoint of step 2 could not be written: File too large" in done.stdout
    assert "the checkpoint of step 1 is still valid" in done.stdout
    assert [path.name for path in store.root.iterdir()] == ["step-000001"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own, to fill up, takes root to mount")
def test_a_full_disk_leaves_the_old_checkpoint_valid(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this host does not let root mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        store = BundleStore(root / "checkpoints", keep=2)
        store.write(1, {}, fill_with(a=b"x" * 4096))
        with pytest.raises(BundleError, match="No space left on device") as caught:
            store.write(2, {}, fill_with(a=b"x" * (1 << 20)))
        assert "step 1 is still valid" in caught.value.fix
        assert store.latest().step == 1
    finally:
        subprocess.run(["umount", str(root)], check=True)
