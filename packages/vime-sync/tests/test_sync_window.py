"""The window of vLLM versions: both ends, played by modules that are made up, and the one that is installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from vime_sync import WindowError
from vime_sync.vllm_plugin import window
from vime_sync.vllm_plugin.window import BETTER, CLIENT, NEEDED, check_client, check_window, missing_in


def put(root, path):
    """Define a dotted path of classes that ends in a name."""
    *classes, name = path.split(".")
    for part in classes:
        if not hasattr(root, part):
            setattr(root, part, type(part, (), {}))
        root = getattr(root, part)
    setattr(root, name, None)


@pytest.fixture
def vllm(monkeypatch):
    """A function that puts a made-up vLLM, with the given names only, in the place of the installed one."""

    def install(version, parts):
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            monkeypatch.delitem(sys.modules, name)
        names = {"vllm"} | {part.module for part in parts}
        for name in {".".join(full.split(".")[:n]) for full in names for n in range(1, full.count(".") + 2)}:
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        for part in parts:
            put(sys.modules[part.module], part.path)
        monkeypatch.setattr(window, "vllm_version", lambda: f"vllm {version}")

    return install


def test_the_oldest_one_fits_and_says_what_it_does_without(vllm):
    vllm("0.28.0", NEEDED)
    lacks = check_window()
    assert len(lacks) == len(BETTER)
    assert all(lack.startswith("vllm 0.28.0 does without ") for lack in lacks)
    assert "aliased engines that never allocate parameters" in lacks[0]
    assert "vllm.outputs:WeightVersionSpan" in lacks[1]


def test_the_newest_one_lacks_nothing(vllm):
    vllm("0.32.0", (*NEEDED, *BETTER))
    assert check_window() == []


@pytest.mark.parametrize("gone", NEEDED, ids=lambda part: part.path)
def test_whatever_is_missing_is_named_with_what_it_is_for(vllm, gone):
    vllm("0.27.1", [part for part in NEEDED if part != gone])
    with pytest.raises(WindowError) as refused:
        check_window()
    text = str(refused.value)
    assert f"vllm 0.27.1 lacks {gone.module}:{gone.path} ({gone.purpose})" in text
    assert "vLLM 0.28 to 0.32" in text
    assert text.count("vllm.") == 1  # and nothing else is


def test_everything_that_is_missing_is_named_at_once(vllm):
    vllm("0.40.0", [])
    with pytest.raises(WindowError) as refused:
        check_window()
    assert all(str(part) in str(refused.value) for part in NEEDED)


def client_of(parts):
    """An engine client that can do what the parts say."""
    owners = {"AsyncLLM": SimpleNamespace(), "AsyncMPClient": SimpleNamespace(), "BaseRenderer": SimpleNamespace()}
    for part in parts:
        owner, name = part.path.split(".")
        setattr(owners[owner], name, None)
    client = owners["AsyncLLM"]
    client.engine_core, client.renderer = owners["AsyncMPClient"], owners["BaseRenderer"]
    return client


def test_an_engine_client_is_asked_before_the_first_transaction():
    check_client(client_of(CLIENT))
    for gone in CLIENT:
        with pytest.raises(WindowError) as refused:
            check_client(client_of([part for part in CLIENT if part != gone]))
        assert str(gone) in str(refused.value)
    with pytest.raises(WindowError, match="pausing, and dropping caches"):
        check_client(SimpleNamespace())


def test_a_source_tree_is_read_without_importing_it(tmp_path):
    tree = tmp_path / "vllm"
    (tree / "plugins").mkdir(parents=True)
    (tree / "plugins" / "__init__.py").write_text("raise RuntimeError\nfrom x import y as load_endpoint_plugins\n")
    (tree / "outputs.py").write_text("class Other:\n    class WeightVersionSpan: ...\n")
    core = tree / "v1" / "engine"
    core.mkdir(parents=True)
    (core / "core_client.py").write_text("class AsyncMPClient:\n    async def pause_scheduler_async(self): ...\n")
    cumem = tree / "device_allocator"
    cumem.mkdir()
    (cumem / "cumem.py").write_text("class CuMemAllocator:\n    instance: 'CuMemAllocator | None' = None\n")
    found = {(part.module, part.path) for part in (*NEEDED, *CLIENT, *BETTER)} - {
        (part.module, part.path) for part in missing_in(tree)
    }
    assert found == {
        ("vllm.plugins", "load_endpoint_plugins"),
        ("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async"),
        ("vllm.device_allocator.cumem", "CuMemAllocator.instance"),
    }


def test_the_installed_one_has_it_all():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    missing = missing_in(Path(spec.origin).parent)
    assert set(missing) <= set(BETTER)
    release = tuple(int(part) for part in window.vllm_version().split()[-1].split(".")[:2])
    assert missing == [] or release < (0, 32), "what only older releases do without"
