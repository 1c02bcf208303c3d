"""The model: Megatron-Core's ``GPTModel`` with this package's attention and norm, ending before the vocabulary.

The full logits of a long row are the largest tensor there would be, so the model returns the normed hidden states and
:mod:`vime_megatron.logprobs` projects them onto the vocabulary a few tokens at a time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn import functional as F

from vime_megatron.config import TrainerConfig
from vime_megatron.families.mapping import padded_vocab
from vime_megatron.families.shape import ModelShape
from vime_megatron.kernels import PLAIN, Kernels
from vime_megatron.model.attention import StackedSelfAttention
from vime_megatron.model.core_attention import CoreAttention
from vime_megatron.model.gradients import sum_in_place
from vime_megatron.model.layer import DecoderLayer
from vime_megatron.model.mlp import GatedMLP
from vime_megatron.model.moe import MixtureOfExperts
from vime_megatron.model.norm import RMSNorm
from vime_megatron.model.packing import PackedTokens
from vime_megatron.platform.build import check_fusions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PolicyModel(GPTModel):
    """A decoder that returns hidden states ``[s, 1, m]`` instead of logits."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stop before the vocabulary projection."""
        return hidden_states

    def run(self, row: PackedTokens) -> Tensor:
        """Run a packed row.

        Args:
            row: The documents.

        Returns:
            Hidden states after the final norm ``[s, 1, m]`` (of this pipeline stage, if it is not the last).
        """
        hidden: Tensor = self(row.tokens_1t, None, None, packed_seq_params=row)
        return hidden

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the vocabulary projection ``[v, m]``; last stage only."""
        if self.share_embeddings_and_output_weights:
            return cast("Tensor", self.shared_embedding_or_output_weight())
        return cast("Tensor", self.output_layer.weight)


def transformer_config(shape: ModelShape, config: TrainerConfig) -> TransformerConfig:
    """Translate to Megatron's configuration.

    Args:
        shape: The model.
        config: The trainer's settings.

    Returns:
        A configuration whose losses are sums: nothing is averaged over micro-batches or ranks.
    """
    dtype = DTYPES[config.dtype]
    special: dict[str, Any] = {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    if shape.experts:
        special |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.ffn,
            "expert_tensor_parallel_size": config.expert_tensor_parallel,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.normalise_experts,
            "moe_router_load_balancing_type": "none",
        }
    if config.recompute == "full":
        special |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        perform_initialization=False,  # every parameter is loaded, or drawn by name (weights/random.py)
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        sequence_parallel=config.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106  # the one that takes variable lengths; no matter to a dense model
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **special,
    )


def build_policy(
    shape: ModelShape,
    config: TrainerConfig,
    *,
    core_attention: CoreAttention,
    kernels: Kernels = PLAIN,
    first_stage: bool = True,
    last_stage: bool = True,
) -> PolicyModel:
    """Build one rank's part of the model; its weights are not initialised.

    Args:
        shape: The model.
        config: The trainer's settings.
        core_attention: The attention inside documents.
        kernels: The steps between the matrix products.
        first_stage: This pipeline stage holds the embedding.
        last_stage: This pipeline stage holds the final norm and the output projection.

    Returns:
        The model, on Megatron's current device.

    Raises:
        PlatformError: Megatron's configuration asks for extensions that are not installed.
    """
    megatron = transformer_config(shape, config)
    check_fusions(megatron)
    sum_in_place(megatron, kernels)  # after the check: these kernels have what the extension would bring
    layer = get_gpt_layer_local_spec(qk_layernorm=False, normalization="RMSNorm")
    layer.module = DecoderLayer
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention = ModuleSpec(
        module=StackedSelfAttention, params={"core_attention": core_attention, "qk_norm": shape.qk_norm}
    )
    layer.submodules.mlp = MixtureOfExperts if shape.experts else GatedMLP
    count = get_num_layers_to_build(megatron)
    model = PolicyModel(
        config=megatron,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm),
        vocab_size=padded_vocab(shape, config.tensor_parallel),
        max_sequence_length=shape.max_positions,
        pre_process=first_stage,
        post_process=last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",
    )
    _settle(model, kernels, selective=config.recompute == "selective")
    return model


def _settle(model: PolicyModel, kernels: Kernels, *, selective: bool) -> None:
    """Hand the trainer's choices to the modules that Megatron has built."""
    for module in model.modules():
        if isinstance(module, StackedSelfAttention | GatedMLP | MixtureOfExperts | RMSNorm):
            module.kernels = kernels
        if isinstance(module, RMSNorm | GatedMLP):
            module.selective = selective
