"""Checks of the GPU and of what runs on it; all but the imports need one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from verify.context import Context, installed_version
from verify.interpreters import judged
from verify.probe import ask
from verify.report import Result, passed, skipped

# Import name and distribution names of the accelerated parts that a base image may bring.
BACKENDS = {
    "transformer_engine.pytorch": ("transformer-engine", "transformer-engine-rocm", "transformer_engine_torch"),
    "flash_attn": ("flash-attn",),
    "aiter": ("amd-aiter", "aiter"),
    "apex": ("apex",),
}

DEVICES = """
import torch
names = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    # On CUDA gcnArchName exists too, and holds the product's name.
    arch = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    names.append([properties.name, arch.partition(":")[0]])
answer({"devices": names, "built": torch.cuda.get_arch_list()})
"""

ATTENTION = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
works = {}
q = torch.randn(1, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
    try:
        with sdpa_kernel([getattr(SDPBackend, name)]):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.cuda.synchronize()
        works[name] = "" if bool(torch.isfinite(out).all()) else "gives numbers that are not finite"
    except RuntimeError as error:
        works[name] = (str(error).strip() or "no reason given").splitlines()[0]
answer(works)
"""


def check_devices(context: Context) -> Iterator[Result]:
    """Report accelerated parts and try the device.

    Args:
        context: The environment.

    Yields:
        ``backend:*`` for each part that a base image may bring, ``devices`` and ``attention``.
    """
    for module, names in BACKENDS.items():
        yield backend(context, module, names)
    if not context.has_devices:
        yield skipped(
            "devices", context.no_device_reason, "at least one GPU of an architecture that torch was built for"
        )
        yield skipped("attention", context.no_device_reason, "torch's flash attention works in bf16")
        return
    yield devices(context)
    reply = ask(ATTENTION, deadline_s=context.deadline_s)
    wrong, seen = ([reply.problem], "") if reply.value is None else attention_faults(reply.value)
    yield judged(context, "attention", wrong, seen, "torch's flash attention works in bf16")


def attention_faults(works: Mapping[str, str]) -> tuple[list[str], str]:
    """Judge what became of torch's attention kernels.

    Args:
        works: Each kernel, with the reason why it does not work, or an empty text.

    Returns:
        What is wrong, and what is to be reported otherwise: the others need not work, and say why they do not.
    """
    seen = ", ".join(f"not {name} ({why})" if why else name for name, why in works.items())
    return ([] if works.get("FLASH_ATTENTION", "was not tried") == "" else [seen]), seen


def backend(context: Context, module: str, names: tuple[str, ...]) -> Result:
    """Say which build of an accelerated part is there, and that it imports.

    An extension built for the other vendor does not import, because its runtime library is not in the image.
    """
    label = f"backend:{module.partition('.')[0]}"
    version = installed_version(*names)
    expected = f"{module} imports where it is installed"
    if not version:
        return skipped(label, "not installed; the trainer uses torch's attention without it", expected)
    if context.platform == "cpu":
        return skipped(label, f"{version} is installed, and {context.no_device_reason}", expected)
    reply = ask(f"import {module}\nanswer(True)", deadline_s=context.deadline_s)
    return judged(context, label, [reply.problem] if reply.problem else [], version, expected)


def devices(context: Context) -> Result:
    """Check that torch sees GPUs, of architectures that it was built for and that vLLM was built for."""
    label, expected = "devices", "at least one GPU of an architecture that torch and vLLM were built for"
    reply = ask(DEVICES, deadline_s=context.deadline_s)
    if reply.value is None:
        return judged(context, label, [reply.problem], "", expected)
    seen = [f"{name} ({arch})" for name, arch in reply.value["devices"]]
    wrong = [] if seen else ["torch sees no device although the kernel offers one (a mask, or the rights on its node)"]
    wrong += architecture_faults(context.platform, reply.value["devices"], reply.value["built"], os.environ)
    return passed(label, not wrong, "; ".join(wrong or seen), expected)


def architecture_faults(
    platform: str, devices_seen: list[list[str]], built: list[str], environ: Mapping[str, str]
) -> list[str]:
    """Compare the architectures of devices with those that code was compiled for.

    Args:
        platform: ``rocm`` or ``cuda``.
        devices_seen: Product name and architecture of each device.
        built: ``torch.cuda.get_arch_list()``.
        environ: The environment, for the architecture that a ROCm image was built for.

    Returns:
        A sentence for each device that cannot run it. On CUDA code of an older minor version of the same generation
        serves, on ROCm the name has to be equal.
    """
    wrong = []
    image = re.split("[;,]", environ.get("PYTORCH_ROCM_ARCH", ""))
    for name, arch in devices_seen:
        usable = arch in built if platform == "rocm" else any(text.startswith(arch[:-1]) for text in built)
        if not usable:
            wrong.append(f"{name} is {arch}, torch was built for {', '.join(built)}")
        elif platform == "rocm" and any(image) and arch not in image:
            wrong.append(f"{name} is {arch}, vLLM was built for {', '.join(image)}")
    return wrong
