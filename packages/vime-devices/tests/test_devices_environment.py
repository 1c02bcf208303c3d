"""The environment of child processes: what is written, what is removed, what is refused."""

from dataclasses import replace

import pytest
from vime_devices import MaskError, Platform, VisibilityError, child_environment, ray_environment, visible_devices
from vime_devices.environment import with_mask
from vime_devices.topology import synthetic_node

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NODE = [str(i) for i in range(8)]


def test_hip_and_cuda_agree_and_the_base_is_left_alone():
    base = {"PATH": "/bin"}
    child = child_environment(Platform.HIP, own=["3"], node=NODE, base=base)
    assert child.env == {"PATH": "/bin", HIP: "3,0,1,2,4,5,6,7", CUDA: "3,0,1,2,4,5,6,7"}
    assert (child.mask, child.local_indices) == ("3,0,1,2,4,5,6,7", (0,))
    assert (child.removed, child.replaced) == ({}, {})
    assert base == {"PATH": "/bin"}


def test_rocr_goes_and_is_reported_and_the_mask_keeps_its_meaning():
    child = child_environment(Platform.HIP, own=["5"], node=["4", "5"], base={ROCR: "4,5"})
    assert child.env == {HIP: "5,4", CUDA: "5,4"}
    assert child.removed == {ROCR: "4,5"}


def test_masks_that_change_are_reported():
    child = child_environment(Platform.HIP, own=["1"], node=["0", "1"], base={HIP: "0,1", CUDA: "0,1"})
    assert child.replaced == {HIP: "0,1", CUDA: "0,1"}
    same = child_environment(Platform.HIP, own=["0"], node=["0", "1"], base={HIP: "0,1", CUDA: "0,1"})
    assert same.replaced == {}


def test_cuda_writes_own_devices_and_touches_no_other_variable():
    child = child_environment(Platform.CUDA, own=["3"], node=NODE, base={HIP: "0", ROCR: "0"})
    assert child.env == {HIP: "0", ROCR: "0", CUDA: "3"}
    assert (child.removed, child.replaced) == ({}, {})


def test_the_cpu_platform_hides_nothing_and_writes_nothing():
    base = {CUDA: "", "A": "b"}
    child = child_environment(Platform.CPU, own=["0"], node=["0"], base=base)
    assert (child.env, child.local_indices, child.mask, child.removed) == (base, (), "", {})
    assert visible_devices(Platform.CPU, base) == []
    assert ray_environment(Platform.CPU) == {}


@pytest.mark.parametrize("platform", [Platform.HIP, Platform.CUDA])
def test_owning_nothing_writes_minus_one(platform):
    assert child_environment(platform, own=[], node=NODE, base={}).env[CUDA] == "-1"


@pytest.mark.parametrize(
    ("platform", "base"),
    [(Platform.CUDA, {CUDA: "2,3"}), (Platform.HIP, {HIP: "2,3"}), (Platform.HIP, {ROCR: "2,3"})],
)
def test_a_child_never_sees_what_is_hidden_from_its_launcher(platform, base):
    with pytest.raises(MaskError, match="hidden from its launcher") as caught:
        child_environment(platform, own=["0"], node=["0", "1"], base=base)
    assert "2,3" in caught.value.expected
    assert child_environment(platform, own=["3"], node=["2", "3"], base=base).local_indices == (0,)


def test_a_launcher_under_rocr_does_not_matter_to_cuda():
    assert child_environment(Platform.CUDA, own=["1"], node=["1"], base={ROCR: "0"}).mask == "1"


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({HIP: "0,2"}, "0 2"),
        ({CUDA: "0,2"}, "0 2"),
        ({HIP: "2", CUDA: "2"}, "2"),
        ({HIP: "2", CUDA: ""}, "2"),
        ({ROCR: "4,5"}, "4 5"),
        ({ROCR: "4,5", HIP: "1"}, "5"),
        ({ROCR: "4,5", HIP: "1,0", CUDA: "1,0"}, "5 4"),
        ({HIP: "-1"}, ""),
        ({ROCR: ""}, ""),
        ({ROCR: "-1", HIP: "0"}, ""),
        ({HIP: "GPU-E044801689257FB4"}, "GPU-e044801689257fb4"),
        ({}, "0 1 2 3 4 5 6 7"),
    ],
)
def test_what_a_process_may_use_on_hip(environ, devices):
    node = synthetic_node(Platform.HIP, 8) if environ == {} else None
    assert visible_devices(Platform.HIP, environ, node=node) == devices.split()


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({CUDA: "1,0", HIP: "3"}, "1 0"),
        ({CUDA: "1, 0"}, "1 0"),
        ({CUDA: ""}, ""),
        ({CUDA: "-1"}, ""),
        ({CUDA: "MIG-GPU-8e4d/7/0"}, "MIG-GPU-8e4d/7/0"),
        ({}, "0 1"),
    ],
)
def test_what_a_process_may_use_on_cuda(environ, devices):
    node = synthetic_node(Platform.CUDA, 2) if environ == {} else None
    assert visible_devices(Platform.CUDA, environ, node=node) == devices.split()


def test_uuids_compose_with_indices_where_the_node_is_known():
    node = synthetic_node(Platform.HIP, 4)
    assert visible_devices(Platform.HIP, {ROCR: "3,2", HIP: node.devices[2].uuid}, node=node) == ["2"]
    with pytest.raises(MaskError, match="the mask beneath it hides"):
        visible_devices(Platform.HIP, {ROCR: "3,2", HIP: node.devices[2].uuid})


def test_a_known_node_refuses_phantoms():
    with pytest.raises(MaskError, match="the node does not have") as caught:
        visible_devices(Platform.CUDA, {CUDA: "0,5"}, node=synthetic_node(Platform.CUDA, 2))
    assert caught.value.seen == "5"


def test_mig_devices_have_names_and_no_numbers():
    gpus = synthetic_node(Platform.CUDA, 2)
    mig = replace(gpus.devices[1], index=2, uuid="MIG-9a8b7c6d-0000-4000-8000-000000000001")
    node = replace(gpus, devices=(*gpus.devices, mig))
    assert visible_devices(Platform.CUDA, {}, node=node) == ["0", "1"]
    assert visible_devices(Platform.CUDA, {CUDA: "MIG-9a8b"}, node=node) == ["MIG-9a8b"]
    for phantom in ("2", "GPU-0"):  # past the GPUs; the prefix of two
        with pytest.raises(MaskError, match="the node does not have"):
            visible_devices(Platform.CUDA, {CUDA: phantom}, node=node)


@pytest.mark.parametrize("environ", [{HIP: ""}, {CUDA: ""}, {HIP: "", CUDA: "3"}])
def test_an_empty_mask_on_rocm_has_no_meaning(environ):
    with pytest.raises(VisibilityError, match="opposite things"):
        visible_devices(Platform.HIP, environ)


def test_masks_that_differ_have_no_meaning():
    with pytest.raises(VisibilityError, match="differ") as caught:
        visible_devices(Platform.HIP, {HIP: "0,1", CUDA: "1,0"})
    assert "'0,1'" in caught.value.fix


def test_a_space_ends_hips_list_so_it_is_refused():
    with pytest.raises(MaskError, match="readers would not agree"):
        visible_devices(Platform.HIP, {HIP: "0, 1"})


def test_ray_is_told_in_the_only_words_it_takes():
    hip = ray_environment(Platform.HIP)
    assert hip == {f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES": "1" for name in ("HIP", "CUDA")}
    assert ray_environment(Platform.CUDA) == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_a_probe_may_write_any_mask():
    assert with_mask(Platform.HIP, {ROCR: "0", "A": "b"}, "") == {"A": "b", HIP: "", CUDA: ""}
    assert with_mask(Platform.CUDA, {ROCR: "0"}, "0x1") == {ROCR: "0", CUDA: "0x1"}
