"""KFD trees: whole GPUs, partitions in every numbering, mixed machines, missing ids, containers."""

from pathlib import Path

import pytest
from vime_devices import Platform, Relation, TopologyError, discover_node, read_kfd, relation
from vime_devices.topology import boot_id, synthetic_node


def test_spx_eight_whole_gpus(node8):
    assert [device.index for device in node8.devices] == list(range(8))
    assert {device.mode for device in node8.devices} == {"SPX"}
    assert {device.partition for device in node8.devices} == {None}
    assert {device.arch for device in node8.devices} == {"gfx942"}
    first = node8.devices[0]
    assert (str(first.id), first.uuid, first.bdf) == ("amd:e044801689257fb0", "GPU-e044801689257fb0", "0000:05:00.0")
    assert (node8.platform, node8.notes, node8.hidden, node8.assumed) == (Platform.HIP, (), 0, False)


def partitioned(gpu, numbering, parts=8, gpus=8):
    """Partitions of whole GPUs, numbered as kernels of three ages do."""
    nodes = []
    for index in range(gpus):
        for part in range(parts):
            node = gpu(index)
            node["location_id"] += {"kernel": part << 28, "function": part, "none": 0}[numbering]
            nodes.append(node)
    return nodes


@pytest.mark.parametrize("numbering", ["kernel", "function", "none"])
def test_cpx_64_devices(kfd, gpu, boot, numbering):
    node = read_kfd(kfd(partitioned(gpu, numbering)), boot_id=boot)
    assert len(node.devices) == 64
    assert len({device.id for device in node.devices}) == 64
    assert {device.mode for device in node.devices} == {"CPX"}
    assert [device.partition for device in node.devices] == list(range(8)) * 8
    assert relation(node.devices[0].id, node.devices[7].id) is Relation.SAME_SOCKET
    assert relation(node.devices[7].id, node.devices[8].id) is Relation.DIFFERENT
    assert node.notes == ()


def test_newer_kernels_give_partitions_ids_of_their_own(kfd, gpu, boot):
    nodes = partitioned(gpu, "kernel", parts=2, gpus=1)
    nodes[1]["unique_id"] += 0x1000
    one, other = read_kfd(kfd(nodes), boot_id=boot).devices
    assert relation(one.id, other.id) is Relation.SAME_SOCKET


@pytest.mark.parametrize(("parts", "mode"), [(2, "DPX"), (3, "TPX"), (4, "QPX"), (5, "5 partitions")])
def test_other_modes(kfd, gpu, boot, parts, mode):
    node = read_kfd(kfd(partitioned(gpu, "function", parts=parts, gpus=2)), boot_id=boot)
    assert {device.mode for device in node.devices} == {mode}


def test_sockets_of_different_machines_are_different_sockets(tmp_path, kfd, gpu):
    tree = kfd(partitioned(gpu, "kernel", parts=2, gpus=1))
    here, there = read_kfd(tree, boot_id="boot-1"), read_kfd(tree, boot_id="boot-2")
    nodes = partitioned(gpu, "kernel", parts=2, gpus=1)
    assert here.devices[0].id.socket != there.devices[0].id.socket
    assert len(nodes) == 2


def test_a_mixed_machine_groups_isas_and_says_that_the_order_is_uncertain(kfd, gpu, boot):
    isas = [90402, 110000, 90402, 110000]
    node = read_kfd(kfd([gpu(i, gfx_target_version=isa) for i, isa in enumerate(isas)]), boot_id=boot)
    assert [device.arch for device in node.devices] == ["gfx942", "gfx942", "gfx1100", "gfx1100"]
    assert [device.bdf[5:7] for device in node.devices] == ["05", "25", "15", "35"]
    assert any("several ISAs" in note for note in node.notes)


def test_isa_names(kfd, gpu, boot):
    isas = [90010, 90402, 90500, 110501, 0]
    node = read_kfd(kfd([gpu(i, gfx_target_version=isa) for i, isa in enumerate(isas)]), boot_id=boot)
    assert [device.arch for device in node.devices] == ["gfx90a", "gfx942", "gfx950", "gfx1151", ""]


def test_missing_ids_fall_back_to_addresses_and_say_so(kfd, gpu, boot):
    node = read_kfd(kfd([gpu(0, unique_id=0), gpu(1)]), boot_id=boot)
    assert str(node.devices[0].id) == f"bdf:{boot}/0000:05:00.0"
    assert node.devices[0].uuid == "GPU-XX"
    assert str(node.devices[1].id).startswith("amd:")
    assert len(node.notes) == 1


def test_a_container_without_some_render_devices(kfd, gpu, boot, tmp_path):
    render = tmp_path / "dri"
    render.mkdir()
    for index in (1, 3):
        (render / f"renderD{128 + index}").touch()
    node = read_kfd(kfd([gpu(i) for i in range(4)]), boot_id=boot, render=render)
    assert [device.bdf[5:7] for device in node.devices] == ["15", "35"]
    assert [device.index for device in node.devices] == [0, 1]
    assert node.hidden == 2


def test_a_node_that_may_not_be_read_is_hidden(kfd, gpu, boot, monkeypatch):
    tree = kfd([gpu(0), gpu(1)])
    read_text = Path.read_text

    def refuse(path, *args, **kwargs):
        if path.parent.name == "3":
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, *args, **kwargs)

    # Permission bits do not stop root, who may run the tests; the kernel's refusal is an EPERM on read.
    monkeypatch.setattr(Path, "read_text", refuse)
    node = read_kfd(tree, boot_id=boot)
    assert (len(node.devices), node.hidden) == (1, 1)


def test_node_folders_are_numbers_not_texts(kfd, gpu, boot):
    tree = kfd([gpu(i) for i in range(12)], cpus=0)
    (tree / "nodes" / "generation_id").touch()
    node = read_kfd(tree, boot_id=boot)
    assert [int(device.uuid[-2:], 16) - 0xB0 for device in node.devices] == list(range(12))


def test_no_tree_and_a_malformed_one(tmp_path, kfd, gpu, boot):
    with pytest.raises(TopologyError, match="no KFD topology") as caught:
        read_kfd(tmp_path / "nowhere", boot_id=boot)
    assert "--device=/dev/kfd" in caught.value.fix
    tree = kfd([gpu(0)])
    (tree / "nodes/2/properties").write_text("simd_count many\n")
    with pytest.raises(TopologyError, match="malformed") as caught:
        read_kfd(tree, boot_id=boot)
    assert caught.value.seen == "'simd_count many'"


def test_discovery_below_a_root(tmp_path, kfd, gpu):
    tree = tmp_path / "sys/class/kfd/kfd"
    tree.mkdir(parents=True)
    kfd([gpu(0)]).rename(tree / "topology")
    assert discover_node(Platform.HIP, tmp_path).hidden == 1  # no render device
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    assert len(discover_node(Platform.HIP, tmp_path).devices) == 1
    assert discover_node(Platform.CPU, tmp_path).devices == ()


def test_boot_id(tmp_path):
    assert boot_id(tmp_path) == "unknown-boot"
    path = tmp_path / "proc/sys/kernel/random"
    path.mkdir(parents=True)
    (path / "boot_id").write_text("abc\n")
    assert boot_id(tmp_path) == "abc"


@pytest.mark.parametrize("platform", [Platform.HIP, Platform.CUDA])
def test_assumed_nodes_say_so(platform):
    node = synthetic_node(platform, 3)
    assert node.assumed
    assert len({device.id for device in node.devices}) == 3
