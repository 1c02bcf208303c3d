"""The 24 public fault reports as environment plus topology: what the user met, and what this package says instead.

Three are no matter of an environment and stand as what they are about: rocm-systems#817 changed the runtime itself (the
fake runtime's two lines), sglang#32685 and verl#2336 took one device for another (ids that are compared or required).
"""

import pytest
from vime_devices import (
    IdentityError,
    MaskError,
    Platform,
    Relation,
    Source,
    VisibilityError,
    child_environment,
    identify,
    ray_environment,
    read_kfd,
    relation,
    require_same,
    visible_devices,
)
from vime_devices.preflight import Severity, check_pair, check_process
from vime_devices.resolve import resolve
from vime_devices.testing import FakeHipError, FakeNode, Line, synthetic_node

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NODE = [str(i) for i in range(8)]


def finding(findings, code):
    return next(found for found in findings if found.code == code)


def test_01_vime_418_colocated_sync_fails_on_every_gpu_but_0(snap):
    narrow = [snap(f"engine {gpu}", {HIP: str(gpu), CUDA: str(gpu)}) for gpu in range(4)]
    trainers = [snap(f"rank {gpu}", own=(gpu,)) for gpu in range(4)]
    errors = [
        any(found.severity is Severity.ERROR for found in check_pair(trainer, engine))
        for trainer, engine in zip(trainers, narrow, strict=True)
    ]
    assert errors == [False, True, True, True]
    found = finding(check_pair(trainers[3], narrow[3]), "ipc-ordinal-missing")
    assert "hipErrorInvalidValue" in found.symptom
    assert found.where == "rank 3 -> engine 3"


def test_02_ms_swift_9627_rccl_allows_a_peer_that_the_mask_hides(snap):
    found = finding(check_process(snap(environ={HIP: "3", CUDA: "3"})), "narrow-mask")
    assert "invalid device ordinal" in found.symptom
    assert found.fix.endswith("to 3,0,1,2,4,5,6,7")
    child = child_environment(Platform.HIP, own=["3"], node=NODE, base={})
    assert "narrow-mask" not in {f.code for f in check_process(snap(environ=child.env))}


def test_03_rocm_systems_817_handles_began_to_carry_an_ordinal():
    for line, opens in ((Line.ROCM_6, True), (Line.ROCM_7, False)):
        machine = FakeNode(synthetic_node(Platform.HIP, 8), line)
        exporter, importer = machine.process({}), machine.process({HIP: "3"})
        exporter.set_device(3)
        handle = exporter.ipc_get_mem_handle(exporter.malloc(16))
        if opens:
            assert importer.ipc_open_mem_handle(handle)
        else:
            with pytest.raises(FakeHipError, match="hipErrorInvalidValue"):
                importer.ipc_open_mem_handle(handle)


def test_04_rocm_systems_2209_an_image_bakes_in_the_legacy_mode(snap):
    found = finding(
        check_process(snap(environ={"HSA_ENABLE_IPC_MODE_LEGACY": "1"}, kernel_driver="in-tree")), "legacy-ipc"
    )
    assert "invalid argument" in found.symptom
    assert found.fix.startswith("unset HSA_ENABLE_IPC_MODE_LEGACY")


def test_05_rocr_runtime_270_the_kernels_own_driver_lacks_the_legacy_calls(snap):
    dmabuf = snap(environ={"HSA_ENABLE_IPC_MODE_LEGACY": "0"}, kernel_driver="in-tree")
    assert check_process(dmabuf) == []
    apart = snap("other", {"HSA_ENABLE_IPC_MODE_LEGACY": "0"}, namespaces={"net": "net:[2]", "pid": "pid:[1]"})
    assert "10 s" in finding(check_pair(dmabuf, apart), "net-namespace").symptom


def test_06_rocm_systems_10609_mi350_exports_fail_without_a_pattern(kfd, gpu, boot, snap):
    node = read_kfd(kfd([gpu(i, gfx_target_version=90500) for i in range(8)]), boot_id=boot)
    assert "probe-ipc" in finding(check_process(snap(node=node)), "mi350-export").fix


def test_07_vllm_12572_rocr_and_cuda_masks_compose(node8, snap):
    environ = {ROCR: "1", CUDA: "0,1"}
    assert [device.index for device in resolve(environ, node8).runtime] == [1]
    assert "invalid device ordinal" in finding(check_process(snap(environ=environ)), "rocr-with-hip").symptom
    with pytest.raises(MaskError, match="the mask beneath it hides"):
        visible_devices(Platform.HIP, environ)


def test_08_ray_51104_rocr_alone_stops_ray(snap):
    found = finding(check_process(snap(environ={ROCR: "4,5"})), "ray-rocr")
    assert "Please use HIP_VISIBLE_DEVICES" in found.symptom
    assert found.fix == f"unset {ROCR}; set {HIP} and {CUDA} to 4,5"
    assert ROCR not in child_environment(Platform.HIP, own=["4"], node=["4", "5"], base={ROCR: "4,5"}).env


def test_09_ray_46563_num_gpus_does_not_isolate(snap):
    found = finding(check_process(snap(environ={CUDA: "0"})), "cuda-only")
    assert "not isolated" in found.symptom
    assert child_environment(Platform.HIP, own=["0"], node=["0"], base={}).env[HIP] == "0"  # the one HIP reads first


def test_10_verl_1465_ray_writes_one_variable_and_the_framework_the_other(snap, node8):
    environ = {HIP: "3", CUDA: "0"}
    assert [device.index for device in resolve(environ, node8).runtime] == [3]
    assert "wrong GPU" in finding(check_process(snap(environ=environ)), "hip-cuda-differ").symptom
    with pytest.raises(VisibilityError, match="differ"):
        visible_devices(Platform.HIP, environ)


def test_11_miles_1233_a_dead_switch_is_believed(snap):
    found = finding(check_process(snap(environ={f"RAY_EXPERIMENTAL_NOSET_{ROCR}": "1"})), "noset-rocr")
    assert "no code in Ray reads it" in found.message
    assert f"RAY_EXPERIMENTAL_NOSET_{ROCR}" not in ray_environment(Platform.HIP)


def test_12_vllm_33308_a_mask_set_after_the_import_is_ignored(snap):
    late = snap(environ={HIP: "0", CUDA: "0"}, started_environ={}, torch_imported=True, runtime_count=8)
    found = {f.code: f for f in check_process(late)}
    assert "first mask" in found["mask-ignored"].symptom
    assert "mask-changed" in found


def swapped(kfd, gpu, boot):
    """A node whose driver order is not the order of addresses."""
    return read_kfd(kfd([gpu(i, location_id=bus << 8) for i, bus in enumerate((0x26, 0x05, 0x46, 0x15))]), boot_id=boot)


def test_13_vllm_39452_the_uuid_of_an_amdsmi_index_is_another_devices(kfd, gpu, boot):
    node = swapped(kfd, gpu, boot)
    by_address = sorted(node.devices, key=lambda device: device.bdf)  # as amdsmi lists them
    assert relation(node.devices[0].id, by_address[0].id) is Relation.DIFFERENT
    same = next(device for device in by_address if device.bdf == node.devices[0].bdf)
    require_same(node.devices[0].id, same.id, where="amdsmi handle found by address")


def test_14_vllm_46636_inconsistent_variables(snap):
    reordered = snap(environ={HIP: "0,1", CUDA: "1,0"})
    assert "Inconsistent GPU visibility env vars" in finding(check_process(reordered), "hip-cuda-differ").symptom
    child = child_environment(Platform.HIP, own=["1"], node=["0", "1"], base={CUDA: "0,1"})
    assert child.env[HIP] == child.env[CUDA] == "1,0"


def test_15_pytorch_131901_hip_x_is_not_rocm_smi_gpu_x(kfd, gpu, boot, snap):
    found = finding(check_process(snap(node=swapped(kfd, gpu, boot))), "order-differs")
    assert "HIP 1 is number 0 by address" in found.message


@pytest.mark.parametrize(
    "text", ["GPU-E044801689257FB3", "e044801689257fb3", "GPU-E044801689257FB3,GPU-e044801689257fb0"]
)
def test_16_pytorch_180955_a_uuid_mask_gives_no_device(node8, text):
    assert resolve({HIP: text}, node8).runtime == ()
    if text.startswith("GPU-"):
        upper = text.split(",")[:1]
        child = child_environment(Platform.HIP, own=upper, node=[d.uuid for d in node8.devices], base={})
        assert resolve(child.env, node8).devices()[0] == node8.devices[3]
    else:
        with pytest.raises(MaskError, match="readers would not agree"):
            visible_devices(Platform.HIP, {HIP: text})


def test_17_legacy_rocm_build_1170_an_empty_mask_shows_everything(node8, snap):
    assert len(resolve({HIP: ""}, node8).runtime) == 8
    assert finding(check_process(snap(environ={HIP: ""})), "empty-mask").fix.startswith(f"set {HIP} to -1")
    assert child_environment(Platform.HIP, own=[], node=NODE, base={}).mask == "-1"


def test_18_swarmui_565_both_variables_and_no_gpu(node8, snap):
    environ = {ROCR: "1", HIP: "1"}
    assert resolve(environ, node8).runtime == ()
    codes = {f.code for f in check_process(snap(environ=environ))}
    assert {"rocr-with-hip", "no-devices"} <= codes


def test_19_lumi_13_network_cards_are_bound_by_another_order(kfd, gpu, boot):
    node = swapped(kfd, gpu, boot)
    assert [device.bdf for device in node.devices] == ["0000:26:00.0", "0000:05:00.0", "0000:46:00.0", "0000:15:00.0"]


def test_20_numba_hip_7_every_device_has_one_uuid(kfd, gpu, boot, snap):
    with pytest.raises(IdentityError, match="identifies nothing"):
        identify("58580000-0000-0000-0000-000000000000", Source.TORCH_HIP)
    node = read_kfd(kfd([gpu(i, unique_id=0) for i in range(4)]), boot_id=boot)
    assert len({device.id for device in node.devices}) == 4
    assert "share or lack ids" in finding(check_process(snap(node=node)), "node-note").symptom


def test_21_amdsmi_100_partitions_share_their_sockets_ids(kfd, gpu, boot):
    parts = [gpu(i // 8) | {"location_id": gpu(i // 8)["location_id"] | (i % 8) << 28} for i in range(64)]
    node = read_kfd(kfd(parts), boot_id=boot)
    assert len({device.id for device in node.devices}) == 64
    mask = child_environment(Platform.HIP, own=["63"], node=[str(d.index) for d in node.devices], base={})
    assert resolve(mask.env, node).devices()[0] == node.devices[63]
    assert len(resolve(mask.env, node).devices()) == 64


def test_22_sglang_32685_rank_is_not_device():
    uuid = "8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f"
    assert relation(identify(uuid, Source.TORCH_CUDA), identify(f"GPU-{uuid.upper()}", Source.NVML)) is (
        Relation.SAME_DEVICE
    )


def test_23_verl_2336_copies_across_gpus_without_a_word(node8):
    with pytest.raises(IdentityError, match="not the promised device") as caught:
        require_same(node8.devices[0].id, node8.devices[1].id, where="bucket 7 into engine 1")
    assert caught.value.where == "bucket 7 into engine 1"


def test_24_ollama_7480_hiding_nvidia_hides_amd(node8, snap):
    assert resolve({CUDA: "-1"}, node8).runtime == ()
    assert "AMD GPUs disappear" in finding(check_process(snap(environ={CUDA: "-1"})), "cuda-hides-amd").symptom
