"""Our reading of torch's reader against the installed torch, on generated environments."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_devices import Platform, VisibilityError
from vime_devices.parsers import torch_count, torch_visible

torch = pytest.importorskip("torch", reason="torch is not installed; its own parser is the reference here")

NUMBERS = ("0", "1", "2", "7", "63", "-1", "+1", "01", "0x1", " 1", "1 ", "", "+", "-", "x", "1gpu2", "²", "0 1")
NAMES = ("GPU-e0", "GPU-a1", "GPU-", "GPU-E0", "gpu-e0", "MIG-1")
TOKENS = st.sampled_from((*NUMBERS, *NAMES))
TEXTS = st.one_of(st.none(), st.lists(TOKENS, min_size=1, max_size=4).map(",".join))
HINT = "torch's mask parser changed: compare torch.cuda._parse_visible_devices with vime_devices.parsers.torch_env"


def ask_torch(monkeypatch, hip_build, **environ):
    for name in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    for name, text in environ.items():
        if text is not None:
            monkeypatch.setenv(f"{name.upper()}_VISIBLE_DEVICES", text)
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip_build else None)
    return torch.cuda._parse_visible_devices()


@settings(max_examples=400)
@given(rocr=TEXTS, hip=TEXTS, cuda=TEXTS, hip_build=st.booleans())
def test_same_list_as_torch(rocr, hip, cuda, hip_build):
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            theirs = ask_torch(monkeypatch, hip_build, rocr=rocr, hip=hip, cuda=cuda)
        except (RuntimeError, ValueError) as error:
            theirs = error
    platform = Platform.HIP if hip_build else Platform.CUDA
    try:
        ours = torch_visible(platform, rocr=rocr, hip=hip, cuda=cuda)
    except VisibilityError:
        assert isinstance(theirs, Exception), HINT
    else:
        assert ours == theirs, HINT


SERIALS = ["e044801689257fb4", "a1b2c3d4e5f60718", "e0ffffffffffffff"]


@settings(max_examples=200)
@given(hip=TEXTS.filter(lambda text: text is None or not ({"+", "-", "²"} & set(text.split(",")))))
def test_same_count_as_torch_on_hip(hip):
    with pytest.MonkeyPatch.context() as monkeypatch:
        ask_torch(monkeypatch, True, hip=hip)
        monkeypatch.setattr(torch.cuda, "_raw_device_uuid_amdsmi", lambda: SERIALS)
        monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: len(SERIALS))
        theirs = torch.cuda._device_count_amdsmi()
    ours = torch_count(Platform.HIP, torch_visible(Platform.HIP, hip=hip), SERIALS)
    assert len(ours) == theirs, HINT


@settings(max_examples=200)
@given(cuda=TEXTS.filter(lambda text: text is None or not ({"+", "-", "²"} & set(text.split(",")))))
def test_same_count_as_torch_on_cuda(cuda):
    uuids = [f"GPU-{serial}" for serial in SERIALS]
    with pytest.MonkeyPatch.context() as monkeypatch:
        ask_torch(monkeypatch, False, cuda=cuda)
        monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: uuids)
        monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(uuids))
        theirs = torch.cuda._device_count_nvml()
    visible = torch_visible(Platform.CUDA, cuda=cuda)
    if visible and str(visible[0]).startswith("MIG-"):
        assert theirs == -1, HINT  # torch asks the driver
    else:
        assert len(torch_count(Platform.CUDA, visible, uuids)) == theirs, HINT


def test_the_names_we_stand_on_exist():
    for name in ("_parse_visible_devices", "_device_count_amdsmi", "_device_count_nvml", "_transform_uuid_to_ordinals"):
        assert hasattr(torch.cuda, name), f"torch.cuda.{name} is gone; {HINT}"
