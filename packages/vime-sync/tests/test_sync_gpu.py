"""On a real GPU: the kernel, the handles, and what the runtime does with them. Skipped where there is none.

What needs a process of its own (another device mask, another allocator, an exporter that has ended) is started at once
by the `children` fixture, because most of such a process's time goes to importing torch.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from vime_sync import Box, Publisher, StaleSourceError, TransportError, WeightSource
from vime_sync.copying import Item, Mover
from vime_sync.digest import digest_box, digest_tensor
from vime_sync.layout import whole
from vime_sync.transports.ipc import FIELDS, IpcImporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU"),
]
pair = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MASKS = ("0", "1", "0,1", "1,0")
IMPORT = """
    import json, sys, torch
    from vime_sync.copying import Item, Mover
    from vime_sync.errors import SyncError, to_wire
    from vime_sync.layout import whole
    from vime_sync.transports.ipc import IpcImporter
    sources = json.loads(sys.stdin.readline())
    needed = {(source["rank"], name) for source in sources for name in source["buffers"]}
    device, found = torch.device("cuda", 0), {}
    try:
        for session in range(2):
            importer = IpcImporter(sources, needed, device)
            for (rank, name), flat in importer.open().items():
                shape, into = tuple(flat.shape), torch.zeros_like(flat)
                items = [Item(flat, into, whole(shape), shape, "w")]
                [digest] = Mover(items, device, "triton").run(digest="full", phase=0)
                plain = flat.clone()
                found[f"{session} {rank}"] = {
                    "digest": str(digest), "equal": torch.equal(plain, into), "route": importer.routes[(rank, name)]
                }
            del flat, items, importer
            torch.cuda.ipc_collect()
        print(json.dumps(found))
    except SyncError as error:
        print(json.dumps(to_wire(error)))
"""
ENDED = """
    import json, torch
    from vime_sync import Publisher, WeightSource
    flat = torch.ones(1000, device="cuda")
    print(json.dumps(Publisher(WeightSource.from_tensors({"w": flat}), "ipc").manifest()["sources"]))
"""
EXPANDABLE = """
    import json, torch
    from vime_sync import Publisher, SyncError, WeightSource
    from vime_sync.errors import to_wire
    flat = torch.ones(1 << 22, device="cuda")
    here = [s for s in torch.cuda.memory_snapshot() if s["address"] <= flat.data_ptr() < s["address"] + s["total_size"]]
    expandable = bool(here[0].get("is_expandable"))
    try:
        Publisher(WeightSource.from_tensors({"w": flat}), "ipc")
        print(json.dumps({"error": "", "expandable": expandable}))
    except SyncError as error:
        print(json.dumps({**to_wire(error), "expandable": expandable}))
"""
BENCH = """
    import json, sys
    from vime_sync.bench import run_bench, shape_of_size
    if __name__ == "__main__":
        print(json.dumps(run_bench("ipc", mode=sys.argv[1], shape=shape_of_size(512), rounds=3).to_dict()))
"""


def start(folder, name, code, *arguments, text="", **environment):
    """A script as a process; its standard input is written, its output left to be read."""
    script = folder / f"{name}.py"
    script.write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    process.stdin.write(text)
    process.stdin.flush()
    return process


@pytest.fixture(scope="module")
def published():
    """A publisher a device, with the buffer that it holds."""
    found = []
    for device in range(torch.cuda.device_count()):
        flat = torch.arange(1 << 20, dtype=torch.float32, device=f"cuda:{device}")
        found.append((flat, Publisher(WeightSource.from_tensors({"w": flat}, rank=device), "ipc")))
    yield found
    for _, publisher in found:
        publisher.close()


@pytest.fixture(scope="module")
def children(published, tmp_path_factory):
    """All processes, by name; `answer` waits for one."""
    folder = tmp_path_factory.mktemp("children")
    sources = [source for _, publisher in published for source in publisher.manifest()["sources"]]
    text = json.dumps(sources) + "\n"
    masks = MASKS if len(published) > 1 else ()
    found = {mask: start(folder, f"import-{mask}", IMPORT, text=text, CUDA_VISIBLE_DEVICES=mask) for mask in masks}
    found["ended"] = start(folder, "ended", ENDED)
    setting = "expandable_segments:True"
    found["expandable"] = start(
        folder, "expandable", EXPANDABLE, PYTORCH_ALLOC_CONF=setting, PYTORCH_CUDA_ALLOC_CONF=setting
    )
    for source in sources:
        for record in source["buffers"].values():
            record["handle"]["host"] = "another"
    found["another host"] = start(folder, "host", IMPORT, text=json.dumps(sources) + "\n")
    for mode in ("copy", "alias"):
        found[mode] = start(folder, f"bench_{mode}", BENCH, mode)
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


def answer(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


CASES = {
    "whole": ((512, 384), Box((0, 0), (512, 384))),
    "rows": ((512, 384), Box((100, 0), (37, 384))),
    "columns": ((512, 384), Box((0, 64), (512, 96))),
    "odd columns": ((64, 31), Box((0, 3), (64, 7))),
    "odd whole": ((7, 9), Box((0, 0), (7, 9))),
    "stack": ((6, 40, 64), Box((2, 8, 16), (3, 24, 32))),
    "vector": ((4099,), Box((0,), (4099,))),
    "large": ((3000, 4096), Box((0, 0), (3000, 4096))),
}


@pytest.mark.parametrize("mode", ["off", "sampled", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_the_kernel_copies_and_digests_like_torch(mode, dtype, children):
    items = []
    for name, (full, box) in CASES.items():
        source = (random(*full) * 50).to(dtype)
        view = source[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        items.append(Item(view, torch.zeros(box.shape, dtype=dtype, device="cuda"), box, full, name))
    mover = Mover(items, torch.device("cuda", 0), "triton")
    assert 0 < mover.plain < len(items)
    mover.prepare(mode)
    assert not any(one.target.any() for one in items), "compiling must not write"
    digests = mover.run(digest=mode, phase=5)
    for index, one in enumerate(items):
        assert torch.equal(one.source, one.target), one.name
        if mode != "off":
            expected = digest_box(one.source, one.box, one.full, one.name, mode=mode, phase=5)
            assert digests[index] == digests[index].from_tensor(expected), one.name


def test_one_flipped_bit_changes_the_digest_of_its_tensor_only():
    sources = [random(256, 256) for _ in range(3)]
    items = [Item(s, s, whole((256, 256)), (256, 256), f"t{i}") for i, s in enumerate(sources)]
    mover = Mover(items, torch.device("cuda", 0), "triton")
    before = mover.run(digest="full", phase=0, write=False)
    sources[1].view(torch.int16)[200, 100] ^= 1
    after = mover.run(digest="full", phase=0, write=False)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pair
def test_a_kernel_reads_another_device_of_its_process():
    source = random(512, 4096)
    into = torch.zeros(512, 4096, dtype=source.dtype, device="cuda:1")
    [digest] = Mover([Item(source, into, whole((512, 4096)), (512, 4096), "w")], torch.device("cuda", 1), "triton").run(
        digest="full", phase=0
    )
    assert torch.equal(source.cpu(), into.cpu())
    assert digest == digest_tensor(source, "w")


def test_torch_gives_handles_of_exactly_these_types():
    shared = torch.ones(1000, device="cuda").untyped_storage()._share_cuda_()
    assert [type(value) for value in shared] == list(FIELDS.values())


@pair
@pytest.mark.parametrize("mask", MASKS)
def test_handles_open_twice_under_every_mask_and_say_how_they_are_reached(mask, children, published):
    found = answer(children[mask])
    for device, (flat, _) in enumerate(published):
        for session in range(2):
            one = found[f"{session} {device}"]
            assert one["equal"]
            assert one["digest"] == str(digest_tensor(flat, "w"))
            assert one["route"] == ("local" if mask[0] == str(device) else "peer")


def test_a_handle_of_another_host_is_refused_before_the_runtime_is_asked(children):
    found = answer(children["another host"])
    assert found["error"] == TransportError.__name__
    assert "another host" in found["what"]


def test_a_handle_of_a_trainer_that_has_ended_is_stale(children):
    sources = answer(children["ended"])
    needed = {(0, name) for name in sources[0]["buffers"]}
    with pytest.raises(StaleSourceError, match="does not open"):
        IpcImporter(sources, needed, torch.device("cuda", 0)).open()


def test_expandable_segments_are_refused_by_name(children):
    found = answer(children["expandable"])
    if not found["expandable"]:
        pytest.skip("this allocator makes no expandable segments here, although it was told to")
    assert found["error"] == TransportError.__name__
    assert "shared" in found["what"] or "share" in found["what"]


@pytest.mark.parametrize("mode", ["copy", "alias"])
def test_a_worker_takes_versions_over_ipc(mode, children):
    found = answer(children[mode])
    assert found["digest_ok"]
    assert found["device"] == "cuda:0"
    assert len(found["seconds"]) == 3
