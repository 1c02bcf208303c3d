"""Weight gradients of Megatron's linears are added where they are summed, in the float32 gradient buffers.

By default a linear returns the gradient of its weight in the weight's type, rounded, and a hook adds that to the
buffer in another pass over both. Megatron can have the product itself add to the buffer
(``gradient_accumulation_fusion``), but through an extension that only nvcc compiles. All it asks of the extension is
one function, which the trainer's own kernels have: where the matrix library can add a half-precision product to a
float32 sum, nothing is rounded and nothing is passed over twice, on both vendors; elsewhere the numbers are the
default's, bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from vime_megatron.kernels import Kernels


def sum_in_place(config: TransformerConfig, kernels: Kernels) -> None:
    """Switch the linears that will be built with a configuration to sums in the gradient buffers.

    Megatron looks the function up by name in its module, so this holds for the process, which has one trainer. Their
    weights need ``main_grad``, which data-parallel wrapping gives them.

    Args:
        config: Megatron's configuration, changed in place.
        kernels: What multiplies and adds.
    """

    def add(input_tm: Tensor, grad_tn: Tensor, sum_nm: Tensor) -> None:
        kernels.accumulate(sum_nm, grad_tn, input_tm)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    layers._grad_accum_fusion_available = True
    config.gradient_accumulation_fusion = True
