"""The reference fault and its fix on the fake runtime, and the rules that the runtime follows."""

import pytest
from vime_devices import Platform, child_environment
from vime_devices.preflight import check_pair
from vime_devices.testing import FakeHipError, FakeNode, Line, synthetic_node

HIP = "HIP_VISIBLE_DEVICES"
NODE = [str(i) for i in range(8)]
PAYLOAD = bytes(range(256)) * 16  # 4 KiB


@pytest.fixture(params=list(Line))
def line(request):
    return request.param


@pytest.fixture
def machine():
    return FakeNode(synthetic_node(Platform.HIP, 8), Line.ROCM_7)


def export(machine, target, environ=None):
    exporter = machine.process(environ or {})
    exporter.set_device(target)
    pointer = exporter.malloc(len(PAYLOAD))
    exporter.write(pointer, PAYLOAD)
    return exporter, pointer, exporter.ipc_get_mem_handle(pointer)


@pytest.mark.parametrize(
    ("target", "mask", "opens"),
    [(3, "3", False), (3, "3,0,1,2,4,5,6,7", True), (0, "0", True), (0, "0,1,2,3,4,5,6,7", True)],
)
def test_the_four_arms_of_the_published_probe(machine, target, mask, opens):
    _, _, handle = export(machine, target)
    importer = machine.process({HIP: mask})
    if opens:
        assert importer.read(importer.ipc_open_mem_handle(handle)) == PAYLOAD
    else:
        with pytest.raises(FakeHipError, match="hipErrorInvalidValue") as caught:
            importer.ipc_open_mem_handle(handle)
        assert caught.value.seen == f"ordinal {target}"


def sync(machine, mask_of):
    """Four single-GPU engines colocated with four trainer ranks that see the node; which of them can open?"""
    outcomes = []
    for gpu in range(4):
        _, _, handle = export(machine, gpu)
        engine = machine.process(mask_of(gpu))
        try:
            outcomes.append(engine.read(engine.ipc_open_mem_handle(handle)) == PAYLOAD)
        except FakeHipError:
            outcomes.append(False)
    return outcomes


def test_end_to_end_three_of_four_engines_fail_without_the_fix(machine):
    assert sync(machine, lambda gpu: {HIP: str(gpu)}) == [True, False, False, False]


def test_end_to_end_no_engine_fails_with_the_fix(machine):
    written = [child_environment(Platform.HIP, own=[gpu], node=NODE, base={}) for gpu in range(4)]
    assert sync(machine, lambda gpu: written[gpu].env) == [True] * 4
    assert [child.local_indices for child in written] == [(0,)] * 4


def test_rocm_6_never_failed():
    old = FakeNode(synthetic_node(Platform.HIP, 8), Line.ROCM_6)
    assert sync(old, lambda gpu: {HIP: str(gpu)}) == [True] * 4


def test_an_ordinal_in_range_that_denotes_another_gpu_opens_silently_for_that_gpu(machine):
    _, _, handle = export(machine, 3)
    importer = machine.process({HIP: "3,0,1,2"})
    pointer = importer.ipc_open_mem_handle(handle)
    assert importer.read(pointer) == PAYLOAD
    assert importer.opened_on_wrong_device(pointer)
    assert importer.peers == {(0, 3)}  # its ordinal 3 is the node's device 2
    same = machine.process({})
    same.set_device(3)
    assert not same.opened_on_wrong_device(same.ipc_open_mem_handle(handle))
    assert same.peers == set()


def test_preflight_says_beforehand_what_the_runtime_then_does(machine, snap, node8):
    for target in range(8):
        for mask in ("3", "3,0", "3,0,1,2,4,5,6,7", "0,1,2,3,4,5,6,7", "7,6,5,4,3,2,1,0"):
            _, _, handle = export(machine, target)
            findings = check_pair(snap("exporter", own=(target,)), snap("importer", {HIP: mask}))
            codes = {finding.code for finding in findings}
            importer = machine.process({HIP: mask})
            try:
                pointer = importer.ipc_open_mem_handle(handle)
            except FakeHipError:
                assert codes == {"ipc-ordinal-missing"}
            else:
                assert codes == ({"ipc-other-device"} if importer.opened_on_wrong_device(pointer) else set())


def test_a_process_cannot_open_its_own_handle(line):
    exporter, _, handle = export(FakeNode(synthetic_node(Platform.HIP, 2), line), 1)
    with pytest.raises(FakeHipError, match="hipErrorInvalidContext"):
        exporter.ipc_open_mem_handle(handle)


def test_flags_sizes_and_foreign_pointers(machine):
    exporter, _, handle = export(machine, 0)
    importer = machine.process({})
    with pytest.raises(FakeHipError, match="hipErrorInvalidValue"):
        importer.ipc_open_mem_handle(handle, flags=0)
    assert exporter.malloc(0) == 0
    for process, pointer in ((exporter, 0), (importer, importer.ipc_open_mem_handle(handle))):
        with pytest.raises(FakeHipError, match="hipErrorInvalidValue"):
            process.ipc_get_mem_handle(pointer)


def test_a_handle_opened_twice_is_one_mapping(machine):
    _, _, handle = export(machine, 0)
    importer = machine.process({})
    first, second = importer.ipc_open_mem_handle(handle), importer.ipc_open_mem_handle(handle)
    assert first == second
    importer.ipc_close_mem_handle(first)
    assert importer.read(first) == PAYLOAD
    importer.ipc_close_mem_handle(first)
    with pytest.raises(FakeHipError, match="hipErrorIllegalAddress"):
        importer.read(first)
    assert importer.ipc_open_mem_handle(handle) != first


def test_memory_that_the_owner_freed(machine):
    exporter, pointer, handle = export(machine, 0)
    late, early = machine.process({}), machine.process({})
    opened = early.ipc_open_mem_handle(handle)
    exporter.free(pointer)
    with pytest.raises(FakeHipError, match="hipErrorInvalidValue"):
        late.ipc_open_mem_handle(handle)
    with pytest.raises(FakeHipError, match="hipErrorIllegalAddress"):
        early.read(opened)


def test_rocm_6_needs_a_path_from_the_current_device():
    old = FakeNode(synthetic_node(Platform.HIP, 2), Line.ROCM_6, unreachable=[(0, 1)])
    _, _, handle = export(old, 1)
    importer = old.process({})
    with pytest.raises(FakeHipError, match="hipErrorInvalidValue"):
        importer.ipc_open_mem_handle(handle)
    importer.set_device(1)
    assert importer.read(importer.ipc_open_mem_handle(handle)) == PAYLOAD


def test_peer_access(machine):
    machine.unreachable = [(0, 1)]
    process = machine.process({})
    process.enable_peer_access(2)
    assert process.peers == {(0, 2)}
    with pytest.raises(FakeHipError, match="hipErrorPeerAccessUnsupported"):
        process.enable_peer_access(1)
    with pytest.raises(FakeHipError, match="hipErrorInvalidDevice"):
        process.enable_peer_access(8)


def test_a_process_without_devices(machine):
    hidden = machine.process({HIP: "-1"})
    with pytest.raises(FakeHipError, match="hipErrorNoDevice"):
        hidden.malloc(1)
    with pytest.raises(FakeHipError, match="hipErrorInvalidDevice"):
        hidden.set_device(0)
