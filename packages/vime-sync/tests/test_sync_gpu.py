"""On a real GPU: the kernel, the handles, and what the runtime does with them. Skipped where there is none."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from vime_sync import Box, Publisher, Region, StaleSourceError, TransportError, WeightSource
from vime_sync.copying import Item, Mover
from vime_sync.digest import digest_box
from vime_sync.layout import whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU"),
]


def item(source, target, box, full, name="w"):
    return Item(source, target, box, full, name)


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
def test_the_kernel_copies_and_digests_like_torch(mode, dtype):
    items = []
    for name, (full, box) in CASES.items():
        source = (random(*full) * 50).to(dtype)
        view = source[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        items.append(item(view, torch.zeros(box.shape, dtype=dtype, device="cuda"), box, full, name))
    mover = Mover(items, torch.device("cuda", 0), "triton")
    assert 0 < mover.plain < len(items)
    digests = mover.run(digest=mode, phase=5)
    for index, one in enumerate(items):
        assert torch.equal(one.source, one.target), one.name
        if mode != "off":
            expected = digest_box(one.source, one.box, one.full, one.name, mode=mode, phase=5)
            assert digests[index] == digests[index].from_tensor(expected), one.name


def test_one_flipped_bit_changes_the_digest_of_its_tensor_only():
    sources = [random(256, 256) for _ in range(3)]
    items = [item(s, s, whole((256, 256)), (256, 256), f"t{i}") for i, s in enumerate(sources)]
    mover = Mover(items, torch.device("cuda", 0), "triton")
    before = mover.run(digest="full", phase=0, write=False)
    sources[1].view(torch.int16)[200, 100] ^= 1
    after = mover.run(digest="full", phase=0, write=False)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


IMPORT = """
    import json, sys, torch
    from vime_sync.transports.ipc import IpcImporter
    from vime_sync.errors import SyncError, to_wire
    sources = json.loads(sys.stdin.readline())
    try:
        importer = IpcImporter(sources, {(0, "flat")}, torch.device("cuda", 0))
        flat = importer.open()[(0, "flat")]
        print(json.dumps({"sum": float(flat.double().sum()), "n": flat.numel(), "route": importer.routes[(0, "flat")]}))
    except SyncError as error:
        print(json.dumps(to_wire(error)))
"""


def run_child(code, text="", **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def published(device=0):
    flat = torch.arange(1000, dtype=torch.float32, device=f"cuda:{device}")
    source = WeightSource.from_tensors({"w": flat})
    name = next(iter(source.buffers))
    source = WeightSource.from_regions({"flat": source.buffers[name]}, [_renamed(tensor) for tensor in source.tensors])
    return flat, Publisher(source, "ipc")


def _renamed(tensor):
    piece = tensor.pieces[0]
    region = Region(0, "flat", piece.region.offset, piece.region.shape, piece.region.strides)
    return type(tensor)(tensor.name, tensor.shape, tensor.dtype, (type(piece)(piece.box, region),))


@pytest.mark.parametrize("mask", ["0", "1", "0,1", "1,0"])
@pytest.mark.parametrize("device", [0, 1])
def test_a_handle_opens_under_every_mask_and_says_how_it_is_reached(device, mask):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flat, publisher = published(device)
    answer = run_child(IMPORT, json.dumps(publisher.manifest()["sources"]) + "\n", CUDA_VISIBLE_DEVICES=mask)
    assert answer["sum"] == float(flat.double().sum())
    assert answer["route"] == ("local" if mask[0] == str(device) else "peer")
    publisher.close()


def test_a_handle_of_another_host_is_refused_before_the_runtime_is_asked():
    _, publisher = published()
    sources = publisher.manifest()["sources"]
    sources[0]["buffers"]["flat"]["handle"]["host"] = "another"
    answer = run_child(IMPORT, json.dumps(sources) + "\n")
    assert answer["error"] == "TransportError"
    assert "another host" in answer["what"]
    publisher.close()


def test_a_handle_of_a_trainer_that_has_ended_is_stale():
    code = """
        import json, torch
        from vime_sync import Publisher, WeightSource
        flat = torch.ones(1000, device="cuda")
        print(json.dumps(Publisher(WeightSource.from_tensors({"w": flat}), "ipc").manifest()["sources"]))
    """
    sources = run_child(code)
    from vime_sync.transports.ipc import IpcImporter

    needed = {(0, name) for name in sources[0]["buffers"]}
    with pytest.raises(StaleSourceError, match="does not open"):
        IpcImporter(sources, needed, torch.device("cuda", 0)).open()


def test_expandable_segments_are_refused_by_name():
    code = """
        import json, torch
        from vime_sync import Publisher, SyncError, WeightSource
        from vime_sync.errors import to_wire
        flat = torch.ones(1 << 22, device="cuda")
        try:
            Publisher(WeightSource.from_tensors({"w": flat}), "ipc")
            print(json.dumps({"error": ""}))
        except SyncError as error:
            print(json.dumps(to_wire(error)))
    """
    answer = run_child(code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert answer["error"] == TransportError.__name__
    assert "expandable" in answer["what"]
