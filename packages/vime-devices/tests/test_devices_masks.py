"""Masks: the published cases, and every way in which a list can be refused."""

import pytest
from vime_devices import MaskError, Platform, PlatformError, compose, devices_at, engine_mask, parse_devices
from vime_devices.masks import check_entries

U0, U1 = "GPU-e044801689257fb4", "GPU-a1b2c3d4e5f60718"


@pytest.mark.parametrize(
    ("own", "node", "mask"),
    [
        ("0,1", "0,1", "0,1"),  # one engine over both GPUs of a two-GPU node
        ("1", "0,1", "1,0"),  # two one-GPU engines, the engine on GPU 1
        ("3", "0-7", "3,0,1,2,4,5,6,7"),  # an eight-GPU node, a one-GPU engine on GPU 3
        ("4-7", "0-7", "4,5,6,7,0,1,2,3"),
        ("6,2", "2,6,4", "6,2,4"),  # neither contiguous nor sorted
        (U1, f"{U0},{U1}", f"{U1},{U0}"),
    ],
)
def test_hip_puts_own_devices_first_and_keeps_the_rest(own, node, mask):
    result = engine_mask(Platform.HIP, parse_devices(Platform.HIP, own), parse_devices(Platform.HIP, node))
    assert result.text == mask
    assert result.entries == tuple(mask.split(","))
    assert [result.entries[i] for i in result.local_indices] == list(parse_devices(Platform.HIP, own))


@pytest.mark.parametrize("own", ["3", "0,1", "7,2", "GPU-8E4D6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f", "MIG-GPU-8e4d/7/0"])
def test_cuda_keeps_the_callers_text_byte_for_byte(own):
    node = ["0", "1", "2", "3", "7"] if own[0].isdigit() else own.split(",")
    result = engine_mask(Platform.CUDA, own.split(","), node)
    assert result.text == own
    assert result.local_indices == tuple(range(len(own.split(","))))


def test_integers_are_entries_too():
    assert engine_mask(Platform.HIP, [1], range(3)).text == "1,0,2"


@pytest.mark.parametrize("platform", [Platform.HIP, Platform.CUDA])
def test_owning_nothing_hides_everything_and_is_never_empty(platform):
    result = engine_mask(platform, [], range(4))
    assert (result.text, result.entries, result.local_indices) == ("-1", (), ())


def test_the_cpu_platform_has_no_masks():
    with pytest.raises(PlatformError, match="masks do not exist"):
        engine_mask(Platform.CPU, [], [])


def test_an_offset_past_the_node_is_an_error_and_never_a_phantom_index():
    node = ["2", "3", "6", "7"]
    assert devices_at(node, 2, 2) == ("6", "7")
    for offset, count in ((3, 2), (4, 1), (-1, 1), (0, -1)):
        with pytest.raises(MaskError, match="run past the node") as caught:
            devices_at(node, offset, count)
        assert "2,3,6,7" in caught.value.where
    with pytest.raises(MaskError, match="the node does not have") as caught:
        engine_mask(Platform.HIP, ["8"], range(8))
    assert (caught.value.seen, caught.value.where) == ("8", "node devices 0,1,2,3,4,5,6,7")


@pytest.mark.parametrize(
    ("platform", "entries"),
    [
        (Platform.HIP, ["01"]),
        (Platform.HIP, ["+1"]),
        (Platform.HIP, [" 1"]),
        (Platform.HIP, [""]),
        (Platform.HIP, [-1]),
        (Platform.HIP, ["GPU-"]),
        (Platform.HIP, ["GPU-e04"]),  # HIP matches substrings, ROCr prefixes
        (Platform.HIP, ["gpu-e044801689257fb4"]),
        (Platform.HIP, ["GPU-XX"]),
        (Platform.HIP, ["MIG-1"]),
        (Platform.CUDA, ["0x1"]),
        (Platform.CUDA, ["GPU-"]),
        (Platform.CPU, ["GPU-e044801689257fb4"]),
    ],
)
def test_a_selector_that_readers_take_differently_is_refused(platform, entries):
    with pytest.raises(MaskError, match="readers would not agree"):
        check_entries(platform, entries)


def test_amd_ids_come_back_in_the_only_spelling_that_all_readers_take():
    assert check_entries(Platform.HIP, ["GPU-E044801689257FB4"]) == (U0,)


def test_repetitions_and_mixtures_are_refused():
    with pytest.raises(MaskError, match="listed twice") as caught:
        check_entries(Platform.HIP, ["0", 0, "1"])
    assert "second 0" in caught.value.fix
    with pytest.raises(MaskError, match="mixed"):
        check_entries(Platform.HIP, ["0", U0])


@pytest.mark.parametrize(
    ("text", "entries"), [("0-3", "0 1 2 3"), ("0, 2,4-5", "0 2 4 5"), ("7", "7"), (f"{U1},{U0}", f"{U1} {U0}")]
)
def test_a_persons_list(text, entries):
    assert parse_devices(Platform.HIP, text) == tuple(entries.split())


def test_a_range_that_runs_backwards():
    with pytest.raises(MaskError, match="runs backwards"):
        parse_devices(Platform.HIP, "7-0")


@pytest.mark.parametrize(
    ("outer", "inner", "uuids", "result"),
    [
        ("4,5", "0,1", (), "4,5"),
        ("4,5", "1", (), "5"),
        (f"{U0},{U1}", "1", (), U1),
        (f"{U0},{U1}", U1, (), U1),
        ("1,0", U1, (U0, U1), "1"),
    ],
)
def test_masks_compose(outer, inner, uuids, result):
    assert compose(Platform.HIP, outer.split(","), inner.split(","), uuids=uuids) == tuple(result.split(","))


@pytest.mark.parametrize(
    ("outer", "inner", "uuids"), [("4,5", "4,5", ()), (U0, U1, ()), ("0", U1, (U0, U1)), ("0", U1, ())]
)
def test_a_mask_cannot_name_what_the_mask_beneath_hides(outer, inner, uuids):
    with pytest.raises(MaskError, match="the mask beneath it hides") as caught:
        compose(Platform.HIP, outer.split(","), inner.split(","), uuids=uuids)
    assert outer in caught.value.where
