"""The environment of a child process: written here, and nowhere else.

Rules, with what a user sees where they are broken:

- HIP and CUDA variables agree on ROCm (else vLLM raises "Inconsistent GPU visibility env vars", and frameworks that
  read one of them put ranks on the wrong GPU).
- ROCR never stands beside HIP (the masks compose, and devices vanish: HIP indices count within the ROCr list).
- Never an empty text (HIP reads it as unset, torch as no device). ``-1`` hides all.
- A mask is in place before the process starts: HIP reads it once, and importing torch or vLLM may be that moment.
- One owner of the masks. Ray is told to keep its hands off; the pipeline writes every child's mask itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vime_devices import variables
from vime_devices.errors import MaskError, VisibilityError
from vime_devices.masks import HIDE_ALL, check_entries, compose, engine_mask
from vime_devices.platforms import Platform
from vime_devices.topology import Node, discover_node


@dataclass(frozen=True, slots=True)
class ChildEnvironment:
    """What to start a child process with.

    Attributes:
        env: The whole environment: ``base`` with the masks written.
        local_indices: Ordinals of the child's own devices under its mask.
        mask: The mask; empty on a platform without masks.
        removed: Variables of ``base`` that are gone, with their values.
        replaced: Variables of ``base`` that have another value now, with their former values.
    """

    env: dict[str, str]
    local_indices: tuple[int, ...]
    mask: str
    removed: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


def visible_devices(platform: Platform, environ: Mapping[str, str], *, node: Node | None = None) -> list[str]:
    """List the devices that a process with this environment may use, as entries for ``child_environment``.

    Indices count in the driver's list, below every variable, whatever masks are stacked: under
    ``ROCR_VISIBLE_DEVICES=4,5`` and ``HIP_VISIBLE_DEVICES=1`` the answer is ``["5"]``.

    Args:
        platform: Whose rules hold.
        environ: The environment to read.
        node: The node's devices; by default they are discovered where the environment does not say enough.

    Returns:
        Device entries in the process's enumeration order. On the CPU platform none.

    Raises:
        VisibilityError: Readers would disagree about this environment (two variables that differ, or an empty one).
        MaskError: A mask no reader takes as written, or one that names a device the mask beneath it hides.
        TopologyError: No variable is set and the node's devices cannot be listed.
    """
    if platform is Platform.CPU:
        return []
    if platform is Platform.CUDA:
        masks = [("CUDA", environ.get(variables.CUDA))]
    else:
        masks = [("ROCR", environ.get(variables.ROCR)), ("HIP", _agreed_hip_text(environ))]
    layers = [(name, text) for name, text in masks if text is not None]
    if not layers:
        node = node if node is not None else discover_node(platform)
        return list(_indices(node))
    if any(text in ("", HIDE_ALL) for _, text in layers):
        return []
    entries: tuple[str, ...] | None = None
    for name, text in layers:
        # The driver and torch both take spaces on CUDA; HIP ends its list there, so there they stay an error.
        parts = [part.strip() if platform is Platform.CUDA else part for part in text.split(",")]
        tokens = check_entries(platform, parts, where=f"{name}_VISIBLE_DEVICES={text!r}")
        if entries is None:
            entries = _in_range(tokens, node, name)
        else:
            entries = compose(platform, entries, tokens, uuids=[d.uuid for d in node.devices] if node else ())
    return list(entries or ())


def child_environment(
    platform: Platform,
    *,
    own: Sequence[str | int],
    node: Sequence[str | int],
    base: Mapping[str, str],
) -> ChildEnvironment:
    """Write the environment of a child process that owns some devices of this node.

    Args:
        platform: Whose rules hold.
        own: The child's devices, from ``node``.
        node: Every device the launcher may use: ``visible_devices(platform, base)``.
        base: The environment to start from; it is not changed.

    Returns:
        The child's environment. On the CPU platform it is ``base`` as it was.

    Raises:
        MaskError: A device that ``node`` lacks, or that a mask in ``base`` hides from the launcher itself.
        VisibilityError: ``base`` means different things to different readers.
    """
    if platform is Platform.CPU:
        return ChildEnvironment(dict(base), (), "")
    mask = engine_mask(platform, own, node)
    names = (variables.CUDA,) if platform is Platform.CUDA else (variables.HIP, variables.CUDA)
    inherited = [name for name in (variables.ROCR, *names) if name in base]
    if platform is Platform.CUDA:
        inherited = [name for name in inherited if name != variables.ROCR]
    if inherited:
        _refuse_widening(platform, mask.entries, base, inherited)
    env = dict(base)
    removed: dict[str, str] = {}
    if platform is Platform.HIP and variables.ROCR in env:
        removed[variables.ROCR] = env.pop(variables.ROCR)
    replaced = {name: base[name] for name in names if name in base and base[name] != mask.text}
    env.update(dict.fromkeys(names, mask.text))
    return ChildEnvironment(env, mask.local_indices, mask.text, removed, replaced)


def with_mask(platform: Platform, base: Mapping[str, str], text: str) -> dict[str, str]:
    """Return a copy of an environment under one mask and no other, without any judgement of the mask.

    For probes and tests that need a mask which ``child_environment`` would never write.

    Args:
        platform: HIP or CUDA.
        base: The environment to start from.
        text: The mask, as it shall stand.

    Returns:
        The environment.
    """
    env = {name: value for name, value in base.items() if platform is Platform.CUDA or name != variables.ROCR}
    names = (variables.CUDA,) if platform is Platform.CUDA else (variables.HIP, variables.CUDA)
    return env | dict.fromkeys(names, text)


def ray_environment(platform: Platform) -> dict[str, str]:
    """Return what tells Ray to leave the masks alone; set it before ``ray start`` and in every worker.

    On HIP both switches are needed: a Ray that cannot load amdsmi takes the machine for an NVIDIA one and writes the
    CUDA variable, which HIP then reads. ``RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES`` is never set: no Ray code
    reads it, and frameworks that test for any such variable would believe it.

    Args:
        platform: Whose rules hold.

    Returns:
        Variables to set; the values are "1" because Ray takes only "1" and "true".
    """
    if platform is Platform.CPU:
        return {}
    names = (variables.NOSET_CUDA,) if platform is Platform.CUDA else (variables.NOSET_HIP, variables.NOSET_CUDA)
    return dict.fromkeys(names, "1")


def _agreed_hip_text(environ: Mapping[str, str]) -> str | None:
    """Return the mask above ROCr on which HIP, torch and vLLM agree, or None where there is none."""
    hip, cuda = environ.get(variables.HIP), environ.get(variables.CUDA)
    deciding, name = (hip, variables.HIP) if hip is not None else (cuda, variables.CUDA)
    if deciding == "":
        raise VisibilityError(
            "an empty mask means opposite things on ROCm",
            where=name,
            seen="''",
            expected="a device list, '-1', or no variable (HIP reads empty as unset, torch as no device)",
            fix=f"unset {name} to see every device, or set it to -1 to hide all",
        )
    if hip and cuda and hip != cuda:
        raise VisibilityError(
            "HIP and CUDA masks differ on ROCm",
            where="environment",
            seen=f"{variables.HIP}={hip!r}, {variables.CUDA}={cuda!r}",
            expected="equal texts (HIP ignores the CUDA one, vLLM raises, other frameworks read either)",
            fix=f"set {variables.CUDA} to {hip!r} or unset it",
        )
    return deciding


def _indices(node: Node) -> tuple[str, ...]:
    """Return the numbers that may stand in a mask; MIG devices have names only."""
    return tuple(str(device.index) for device in node.devices if not device.uuid.startswith("MIG-"))


def _in_range(tokens: tuple[str, ...], node: Node | None, name: str) -> tuple[str, ...]:
    """Return the tokens, having checked them against the node where it is known."""
    if node is None:
        return tokens
    indices, uuids = _indices(node), [device.uuid for device in node.devices]
    phantom = [t for t in tokens if t not in indices and sum(uuid.startswith(t) for uuid in uuids) != 1]
    if phantom:
        raise MaskError(
            "a mask names devices that the node does not have",
            where=f"{name}_VISIBLE_DEVICES={','.join(tokens)!r}",
            seen=", ".join(phantom),
            expected=f"devices of a node of {len(node.devices)}",
            fix="list the node's devices with `vime-devices explain`",
        )
    return tokens


def _refuse_widening(
    platform: Platform, entries: Sequence[str], base: Mapping[str, str], inherited: Sequence[str]
) -> None:
    allowed = visible_devices(platform, base)
    extra = [entry for entry in entries if entry not in allowed]
    if extra:
        raise MaskError(
            "a child's mask names devices that are hidden from its launcher",
            where=", ".join(f"{name}={base[name]!r}" for name in inherited),
            seen=", ".join(extra),
            expected=f"devices among {','.join(allowed) or 'none'} (indices count below every mask)",
            fix="take `own` and `node` from visible_devices(platform, base)",
        )
