"""Ids: every spelling of one device is one id, and what identifies nothing is refused."""

import pytest
from vime_devices import DeviceId, IdentityError, Relation, Source, assign, identify, relation, require_same
from vime_devices.identity import Claim, fallback_id, normalise_bdf

AMD = "amd:e044801689257fb4"
NVIDIA = "8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("65303434-3830-3136-3839-323537666234", Source.TORCH_HIP),
        ("GPU-e044801689257fb4", Source.ROCR),
        ("gpu-E044801689257FB4", Source.ROCR),
        ("e044801689257fb4", Source.ROCR),
        (0xE044801689257FB4, Source.KFD),
        (str(0xE044801689257FB4), Source.KFD),
        ("0xE044801689257FB4", Source.AMDSMI_SERIAL),
    ],
)
def test_every_spelling_of_an_amd_gpu_is_one_id(text, source):
    assert str(identify(text, source)) == AMD


@pytest.mark.parametrize(("text", "source"), [(NVIDIA, Source.TORCH_CUDA), (f"GPU-{NVIDIA.upper()}", Source.NVML)])
def test_every_spelling_of_an_nvidia_gpu_is_one_id(text, source):
    assert str(identify(text, source)) == f"nvidia:{NVIDIA}"


def test_mig_devices_are_devices_of_their_own():
    new = identify(f"MIG-{NVIDIA}", Source.NVML)
    old = identify(f"MIG-GPU-{NVIDIA}/7/0", Source.NVML)
    gpu = identify(f"GPU-{NVIDIA}", Source.NVML)
    assert str(new) == f"nvidia-mig:{NVIDIA}"
    assert str(old) == f"nvidia-mig:{NVIDIA}/7/0"
    assert relation(old, gpu) is Relation.SAME_SOCKET
    assert relation(old, identify(f"MIG-GPU-{NVIDIA}/8/0", Source.NVML)) is Relation.SAME_SOCKET
    assert relation(new, gpu) is Relation.DIFFERENT


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("GPU-XX", Source.ROCR),
        ("58580000-0000-0000-0000-000000000000", Source.TORCH_HIP),  # "XX" as HIP passes it on
        ("30303030-3030-3030-3030-303030303031", Source.TORCH_HIP),  # an APU that says "1"
        ("00000000-0000-0000-0000-000000000000", Source.TORCH_HIP),
        (0, Source.KFD),
        (7, Source.KFD),
        (2**64, Source.KFD),
        ("N/A", Source.AMDSMI_UUID),
        ("", Source.AMDSMI_SERIAL),
        ("00000000-0000-0000-0000-000000000000", Source.TORCH_CUDA),
        ("GPU-e044801689257fb4", Source.TORCH_CUDA),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", Source.TORCH_HIP),  # not characters
        ("65303434", Source.TORCH_HIP),
        ("GPU-e0448016-8925-7fb4", Source.ROCR),
        ("short", Source.AMDSMI_UUID),
        (f"GPU-{NVIDIA}/7/0", Source.NVML),
    ],
)
def test_a_text_that_identifies_nothing_is_refused(text, source):
    with pytest.raises(IdentityError) as caught:
        identify(text, source)
    assert caught.value.where == source.value
    assert caught.value.seen == repr(text)
    assert caught.value.fix


def test_amdsmis_own_uuid_cannot_be_compared_with_torchs():
    theirs = identify("5fff74a1-0000-1000-80e0-448016892570", Source.AMDSMI_UUID)
    assert relation(theirs, identify(0xE044801689257FB4, Source.KFD)) is Relation.UNKNOWN


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (DeviceId("amd", "e0"), DeviceId("amd", "e0"), Relation.SAME_DEVICE),
        (DeviceId("amd", "e0"), DeviceId("amd", "a1"), Relation.DIFFERENT),
        (DeviceId("amd", "e0", 0), DeviceId("amd", "e0", 3), Relation.SAME_SOCKET),
        (DeviceId("amd", "e0", 3), DeviceId("amd", "e0", 3), Relation.SAME_DEVICE),
        (DeviceId("amd", "e0"), DeviceId("amd", "e0", 3), Relation.UNKNOWN),  # torch does not name the partition
        (DeviceId("amd", "e0", 0, "s"), DeviceId("amd", "e1", 1, "s"), Relation.SAME_SOCKET),
        (DeviceId("amd", "e0", 0, ""), DeviceId("amd", "e1", 1, ""), Relation.DIFFERENT),
        (DeviceId("amd", "e0"), DeviceId("nvidia", "e0"), Relation.DIFFERENT),
        (DeviceId("amd", "e0"), DeviceId("bdf", "boot/0000:05:00.0"), Relation.UNKNOWN),
    ],
)
def test_same_device_and_same_socket_are_two_questions(one, other, expected):
    assert relation(one, other) is expected
    assert relation(other, one) is expected


def test_a_promise_of_a_device_is_kept_or_refused():
    promised = identify(0xE044801689257FB4, Source.KFD)
    require_same(promised, identify("GPU-e044801689257fb4", Source.ROCR), where="weight sync")
    with pytest.raises(IdentityError, match="not the promised device") as caught:
        require_same(promised, DeviceId("amd", "a1" * 8), where="weight sync")
    assert (caught.value.where, caught.value.expected) == ("weight sync", AMD)
    assert "different" in caught.value.seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0000:C1:00.0", "0000:c1:00.0"), ("c1:00.1", "0000:c1:00.1"), ("00000000:C1:00.0", "0000:c1:00.0")],
)
def test_addresses_have_one_spelling(text, expected):
    assert normalise_bdf(text) == expected


def test_what_is_no_address():
    with pytest.raises(IdentityError, match="not a PCI address"):
        normalise_bdf("c1:00")


def claims(*ids, bdfs=None, partitions=None):
    bdfs = bdfs or [f"0000:{5 + i:02x}:00.0" for i in range(len(ids))]
    partitions = partitions or [None] * len(ids)
    return [Claim(text, Source.KFD, bdf, part) for text, bdf, part in zip(ids, bdfs, partitions, strict=True)]


def test_good_ids_are_kept():
    ids, notes = assign(claims(0xE044801689257FB4, 0xA1B2C3D4E5F60718), "boot")
    assert [str(known) for known in ids] == [AMD, "amd:a1b2c3d4e5f60718"]
    assert notes == []


@pytest.mark.parametrize("texts", [(0, 0), (0xE044801689257FB4, 0xE044801689257FB4), (1, 2)])
def test_missing_shared_and_counted_ids_fall_back_to_the_address(texts):
    ids, notes = assign(claims(*texts), "Boot")
    assert [str(known) for known in ids] == ["bdf:boot/0000:05:00.0", "bdf:boot/0000:06:00.0"]
    assert len(notes) == 2
    assert "using bdf:boot/0000:05:00.0" in notes[0]


def test_partitions_share_an_id_and_are_told_apart_by_their_number():
    ids, notes = assign(claims(*[0xE044801689257FB4] * 3, bdfs=["05:00.0"] * 3, partitions=[0, 1, 2]), "boot")
    assert [str(known) for known in ids] == [f"{AMD}/p{n}" for n in range(3)]
    assert notes == []


def test_devices_that_nothing_tells_apart_are_an_error():
    with pytest.raises(IdentityError, match="cannot be told apart"):
        assign(claims(0, 0, bdfs=["05:00.0", "05:00.0"]), "boot")


def test_addresses_hold_for_one_boot():
    one, other = fallback_id("boot-1", "05:00.0"), fallback_id("boot-2", "05:00.0")
    assert relation(one, other) is Relation.DIFFERENT
    assert relation(fallback_id("b", "05:00.0"), fallback_id("b", "05:00.1")) is Relation.SAME_SOCKET
