"""The GPU half without a GPU: handles on the wire, segments by brute force, the kernel in Triton's interpreter."""

import itertools
import json
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_devices import DeviceId
from vime_devices.topology import boot_id
from vime_sync import Box, TransportError
from vime_sync.layout import contiguous_strides
from vime_sync.segments import Placed, segments_of
from vime_sync.transports.ipc import FIELDS, decode_handle, encode_handle

DEVICE = DeviceId("nvidia-uuid", "GPU-1", None)
SHARED = (0, b"\x02c" + bytes(64), 4000, 512, b"/torch_1_2_0", 3, bytes(range(64)), True)


def test_a_handle_comes_back_as_exactly_the_types_that_torch_gave():
    sent = json.loads(json.dumps(encode_handle(SHARED, DEVICE, boot_id())))
    device, host, values = decode_handle(sent, where="w")
    assert (device, host, values) == (DEVICE, boot_id(), SHARED)
    assert [type(value) for value in values] == list(FIELDS.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [("event_sync", 1), ("size", True), ("size", -1), ("size", 1.0), ("handle", 5), ("handle", "*"), ("event", None)],
)
def test_a_field_of_another_type_is_refused(field, value):
    sent = encode_handle(SHARED, DEVICE, boot_id())
    sent["fields"][field] = value
    with pytest.raises(TransportError, match="malformed handle"):
        decode_handle(sent, where="w")


@pytest.mark.parametrize("handle", [b"\x02e" + bytes(28), b"\x02e" + bytes(90), b"\x02?" + bytes(64)])
def test_handles_of_expandable_segments_are_refused_whatever_their_length(handle):
    with pytest.raises(TransportError, match="expandable"):
        encode_handle((0, handle, *SHARED[2:]), DEVICE, boot_id())


@st.composite
def copies(draw):
    """A box of a checkpoint tensor of 16-bit elements, and a padded place to read it from."""
    full = tuple(draw(st.lists(st.sampled_from([1, 3, 4, 8]), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, n - 1)) for n in full)
    shape = tuple(draw(st.integers(1, n - a)) for n, a in zip(full, start, strict=True))
    padded = tuple(n + draw(st.sampled_from([0, 4])) for n in shape)
    return full, Box(start, shape), contiguous_strides(padded)


@settings(max_examples=200, deadline=None)
@given(copies())
def test_segments_enumerate_the_words_of_a_copy(case):
    full, box, strides = case
    dense = contiguous_strides(box.shape)
    found = segments_of(Placed(1 << 20, strides), Placed(1 << 21, dense), box, full, 2)
    if found is None:
        return
    place, expected = contiguous_strides(full), set()
    for index in itertools.product(*(range(n) for n in box.shape)):
        read = (1 << 20) + 2 * sum(i * s for i, s in zip(index, strides, strict=True))
        written = (1 << 21) + 2 * sum(i * s for i, s in zip(index, dense, strict=True))
        element = sum((a + i) * s for a, i, s in zip(box.start, index, place, strict=True))
        if element % 4 == 0:
            expected.add((read, written, element // 4))
    words = [
        (s.source + r * s.source_stride + 8 * w, s.target + r * s.target_stride + 8 * w, s.word + r * s.word_stride + w)
        for s in found
        for r in range(s.rows)
        for w in range(s.row_words)
    ]
    assert len(words) == len(set(words))
    assert set(words) == expected


KERNEL = """
    import json, torch
    from vime_sync import Box
    from vime_sync.copying import Item, Mover
    from vime_sync.digest import digest_box
    from vime_sync.kernels import Tuning
    full, wrong = (96, 64), []
    source = torch.randn(full).to(torch.bfloat16)
    boxes = {"whole": Box((0, 0), full), "rows": Box((8, 0), (9, 64)), "columns": Box((0, 16), (96, 24))}
    for mode in ("off", "sampled", "full"):
        items = []
        for name, box in boxes.items():
            view = source[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))]
            items.append(Item(view, torch.zeros(box.shape, dtype=source.dtype), box, full, name))
        mover = Mover(items, torch.device("cpu"), "triton")
        mover.prepare(mode)
        wrong += [f"{mode}: compiling wrote {i.name}" for i in items if i.target.any()]
        wrong += [f"{mode}: {mover.plain} slices were left to torch"] * (mover.plain > 0)
        digests = mover.run(digest=mode, phase=3) or [None] * len(items)
        for item, digest in zip(items, digests):
            expected = digest_box(item.source, item.box, full, item.name, mode=mode, phase=3)
            equal = digest is None if mode == "off" else digest == digest.from_tensor(expected)
            wrong += [f"{mode}: {item.name}"] * (not equal or not torch.equal(item.source, item.target))
    def moved(items, mode, phase, tuning=None):
        mover = Mover(items, torch.device("cpu"), "triton", tuning=tuning)
        digests = mover.run(digest=mode, phase=phase)
        for item, digest in zip(items, digests):
            expected = digest_box(item.source, item.box, item.full, item.name, mode=mode, phase=phase)
            if digest != digest.from_tensor(expected) or not torch.equal(item.source, item.target):
                wrong.append(f"{mode} {phase} {tuning}: {item.name}")
    # Every block of a long tensor is looked at in one phase of sixteen; a slice of it starts in the middle of a block.
    long = torch.randint(-2**62, 2**62, (40 * 1024 + 100,))
    part = Box((1500,), (20 * 1024,))
    for phase in (0, 5, 15, 31):
        into = [torch.zeros_like(long), torch.zeros(part.shape, dtype=long.dtype)]
        views = [(long, Box((0,), long.shape)), (long[1500 : 1500 + 20 * 1024], part)]
        both = enumerate(zip(views, into))
        moved([Item(v, t, b, tuple(long.shape), f"l{i}") for i, ((v, b), t) in both], "sampled", phase)
    # Many segments of very different sizes, so that hints bound none, one or a hundred of them.
    sizes = [1, 7, 300000, *([2] * 150), 90000, *range(1, 60)]
    many = [torch.randint(-2**62, 2**62, (n,)) for n in sizes]
    whole = [Box((0,), (n,)) for n in sizes]
    for mode in ("off", "full"):
        items = [Item(t, torch.zeros_like(t), b, tuple(t.shape), f"m{i}") for i, (t, b) in enumerate(zip(many, whole))]
        moved(items, mode, 0)
        wrong += [f"{mode}: {i.name} was not copied" for i in items if not torch.equal(i.source, i.target)]
    # However tiles are cut, every word is moved once; columns are strided.
    odd = torch.randint(-2**62, 2**62, (37, 150))
    for tuning in (Tuning(64, 4, 1), Tuning(128, 2, 1)):
        for mode in ("sampled", "full"):
            views = [(odd, Box((0, 0), odd.shape)), (odd[3:30, 7:90], Box((3, 7), (27, 83)))]
            items = [Item(v, torch.zeros_like(v), b, (37, 150), f"o{i}") for i, (v, b) in enumerate(views)]
            moved(items, mode, 16, tuning)
    print(json.dumps(wrong))
"""


def test_the_kernel_copies_and_digests_like_torch():
    """In a process of its own: Triton reads its switch when its own library is declared, which importing torch does."""
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNEL)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
