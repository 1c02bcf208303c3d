"""Keeping a CPU engine's weights where the loaders put them.

After loading, vLLM's CPU build hands every unquantised linear weight to a kernel (oneDNN, on AMX also SGLang's, on Zen
zentorch's), which holds it packed behind a handle, and puts an empty parameter without a loader in its place: nothing
to learn a plan from, and nowhere to copy to. It does so for every dtype; only where no kernel takes the weight does it
stay. No option or environment variable of vLLM's prevents that.

====================  ==================================================================================
vLLM                  what leaves a linear layer plain
====================  ==================================================================================
0.29 and newer        the attribute `SWITCH` on the layer; vLLM sets it itself for layers that it reads elsewhere
0.28                  nothing: its step after loading packs always, so the layer gets another step (`_stay_plain`)
====================  ==================================================================================

Both end in the same layer: weight as loaded, ``torch.nn.functional.linear`` as its kernel. The step is replaced on the
layer's own method object, in a release that will not change any more; vLLM's class is left alone. Nothing here is taken
on trust: what was packed all the same has another fingerprint afterwards and is refused by name (`loader`).

Embeddings and output heads keep their weight and pack a copy beside it, in all of these versions.
"""

from __future__ import annotations

from typing import Any

import torch

from vime_sync.vllm_plugin.window import vllm_version

#: On a layer: vLLM's own request not to pack it.
SWITCH = "_cpu_skip_gemm_dispatch"


def keep_plain(model: torch.nn.Module) -> None:
    """Have vLLM's step after loading leave linear weights alone; to be called before it.

    Args:
        model: A loaded model on a CPU. Quantised layers, and those of other methods, are not touched.
    """
    release = vllm_version().rpartition(" ")[2]
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedLinearMethod":
            setattr(module, SWITCH, True)
            if release.startswith("0.28."):
                method.process_weights_after_loading = _stay_plain


def _stay_plain(layer: Any) -> None:
    """What vLLM's step does in newer releases with a layer that has the switch."""
    layer.cpu_linear = torch.nn.functional.linear


def drop_packed_heads(model: torch.nn.Module) -> None:
    """Make embeddings and output heads compute with their weight instead of the copy; to be called after the step.

    Args:
        model: A post-processed model on a CPU.
    """
    for module in model.modules():
        if type(getattr(module, "quant_method", None)).__name__ == "UnquantizedEmbeddingMethod":
            module.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
