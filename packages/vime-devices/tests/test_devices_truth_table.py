"""The truth table of mask texts, one row per line: text, and what each of the four readers makes of it on two GPUs.

``?`` after an outcome marks one that is not defined (a crash, or undocumented): the reader must say so.
"""

import pytest
from vime_devices import Platform, VisibilityError
from vime_devices.parsers import hip_source, read_cuda, read_hip, read_rocr, torch_count, torch_visible

AMD = ("GPU-e044801689257fb4", "GPU-a1b2c3d4e5f60718")
NVIDIA = ("GPU-8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f", "GPU-1f2e3d4c-5b6a-4978-8899-aabbccddeeff")

ROWS = [
    # text, ROCr, HIP, torch on HIP (HIP variable), CUDA driver
    (None, "01", "01", "01", "01"),
    ("", "", "01", "", ""),
    ("-1", "", "", "", ""),
    ("0,1", "01", "01", "01", "01"),
    ("1,0", "10", "10", "10", "10"),
    ("0, 1", "01", "0", "01", "01"),
    (" 0", "0", "", "0", "0"),
    ("01", "1", "", "1", "1"),
    ("+1", "1", "", "1", "1"),
    ("0x1", "1", "", "0", "0?"),
    ("0x1,1", "1", "", "01", "01?"),
    ("08", "0?", "", "", ""),  # octal stops before the 8; decimal 8 is out of range
    ("1gpu2", "?", "", "1", "1?"),
    ("0,-1,1", "0", "0", "0", "0"),
    ("0,7,1", "0", "0", "0", "0"),
    ("7", "", "", "", ""),
    ("0,0,1", "0", "01", "", ""),
    ("0,,1", "?", "0", "0", "0"),
    ("0,", "0?", "0", "0", "0"),
    (",0", "?", "", "", ""),
    ("x", "", "", "", ""),
    ("gpu", "", "", "", ""),
]


def outcome(expected: str) -> tuple[tuple[int, ...], bool]:
    return tuple(int(digit) for digit in expected.rstrip("?")), not expected.endswith("?")


@pytest.mark.parametrize(("text", "rocr", "hip", "torch", "cuda"), ROWS)
def test_every_reader_of_an_index_mask(text, rocr, hip, torch, cuda):
    for reading, expected in (
        (read_rocr(text, AMD), rocr if text != "08" else "?"),
        (read_hip(text, AMD), hip),
        (read_cuda(text, NVIDIA), cuda),
    ):
        assert (reading.indices, reading.defined) == outcome(expected), reading
        if len(reading.indices) < len((text or "0,1").split(",")) and text:
            assert reading.reason
    visible = torch_visible(Platform.HIP, hip=text)
    assert torch_count(Platform.HIP, visible, ["e044801689257fb4", "a1b2c3d4e5f60718"]) == outcome(torch)[0]
    on_cuda = torch_visible(Platform.CUDA, cuda=text, hip="5", rocr="5")
    assert torch_count(Platform.CUDA, on_cuda, NVIDIA) == outcome(torch)[0]


@pytest.mark.parametrize(
    ("text", "indices", "defined"),
    [
        ("GPU-e044801689257fb4", (0,), True),
        ("gpu-E044", (0,), True),  # without case
        ("GPU-e", (0,), True),  # five characters are enough
        ("GPU-", (), True),  # four are not
        ("GPU-e044801689257fb40", (), True),  # 21 are too many
        ("GPU-e0448016-8925-7fb4", (), True),  # the dashed form of some documents
        ("GPU-a,1", (1,), True),  # 1 is named twice
        ("1,GPU-e", (1, 0), True),  # kinds may mix
        ("GPU-XX", (), True),
        ("GPU-f", (), True),
        ("Gpt", (), True),
    ],
)
def test_rocr_uuid(text, indices, defined):
    reading = read_rocr(text, AMD)
    assert (reading.indices, reading.defined) == (indices, defined)


def test_rocr_refuses_an_ambiguous_prefix_and_devices_without_id():
    assert read_rocr("GPU-e0", ("GPU-e044801689257fb4", "GPU-e0aaaaaaaaaaaaaa")).indices == ()
    assert read_rocr("GPU-XX", ("GPU-XX",)).indices == ()


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("GPU-e044801689257fb4", (0,)),
        ("GPU-a1", (1,)),
        ("GPU-", (0,)),  # the first match; nothing is reported as ambiguous
        ("GPU-E044", ()),  # with case
        ("gpu-e044", ()),
        (" GPU-e044", ()),
        ("1,GPU-e", (1, 0)),
        ("GPU-e,GPU-e,1", (0, 1)),
        ("GPU-f,0", ()),
    ],
)
def test_hip_uuid(text, indices):
    assert read_hip(text, AMD).indices == indices


def test_hip_before_6_2_knows_no_uuid():
    assert read_hip("0,GPU-a1b2c3d4e5f60718", AMD, rocm=(6, 1)).indices == (0,)
    assert read_hip("0,1", AMD, rocm=(6, 1)).indices == (0, 1)


def test_hip_counts_repetitions_in_its_reason():
    assert read_hip("0,0,1", AMD).reason == "1 repeated"


@pytest.mark.parametrize(
    ("hip", "cuda", "source"),
    [("2,1", "7", "2,1"), ("", "3", "3"), (None, "3", "3"), (None, None, None), ("", "", None), ("-1", "3", "-1")],
)
def test_hip_source(hip, cuda, source):
    assert hip_source(hip, cuda) == source


@pytest.mark.parametrize(
    ("text", "indices", "defined"),
    [
        (NVIDIA[1], (1,), True),
        ("GPU-8e4d", (0,), True),
        (f"{NVIDIA[1]},{NVIDIA[0]}", (1, 0), True),
        ("GPU-", (), True),  # ambiguous
        ("GPU-8e4d,1", (0,), False),  # kinds may not mix
        ("0,GPU-1f2e", (0,), False),
        ("GPU-8e4d,", (0,), True),
        ("GPU-8e4d,GPU-8e4d", (), True),
        ("GPU-ffff", (), True),
    ],
)
def test_cuda_uuid(text, indices, defined):
    reading = read_cuda(text, NVIDIA)
    assert (reading.indices, reading.defined) == (indices, defined)


def test_cuda_numbers_count_gpus_only_and_mig_has_its_own_names():
    uuids = (*NVIDIA, "MIG-9a8b7c6d-0000-4000-8000-000000000001")
    assert read_cuda("2", uuids).indices == ()
    assert read_cuda(None, uuids).indices == (0, 1)
    assert read_cuda("MIG-9a8b", uuids).indices == (2,)


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        ("4,5", None, None, [0, 1]),  # counted, not read
        ("", None, None, [0]),
        ("-1", None, None, [0]),
        ("4,5", None, "7", [0, 1]),
        ("4,5", "1", None, [1]),
        (None, "2,1", "7", [2, 1]),
        (None, "", "3", []),
        (None, None, "3", [3]),
        (None, "GPU-e0,1", None, ["GPU-e0"]),
        (None, "GPU-e0,GPU-e0", None, []),
        (None, "GPU-", None, ["GPU-"]),
        (None, "gpu-e0", None, []),
        (None, "MIG-1,MIG-2", None, ["MIG-1", "MIG-2"]),
        (None, "01,+2", None, [1, 2]),
    ],
)
def test_torch_before_initialisation_on_hip(rocr, hip, cuda, expected):
    assert torch_visible(Platform.HIP, rocr=rocr, hip=hip, cuda=cuda) == expected


def test_torch_refuses_more_hip_than_rocr():
    with pytest.raises(VisibilityError, match="longer than the ROCr list"):
        torch_visible(Platform.HIP, rocr="4", hip="0,1")


def test_torch_refuses_a_bare_sign():
    with pytest.raises(VisibilityError, match="no number"):
        torch_visible(Platform.CUDA, cuda="+")


def test_torch_resolves_uuids_against_unfiltered_serials():
    serials = ["e044801689257fb4", "a1b2c3d4e5f60718"]
    assert torch_count(Platform.HIP, ["GPU-a1"], serials) == (1,)
    assert torch_count(Platform.HIP, ["GPU-A1"], serials) == ()
    assert torch_count(Platform.HIP, ["GPU-"], serials) == ()
    assert torch_count(Platform.HIP, ["GPU-a1", "GPU-a1b2"], serials) == ()
