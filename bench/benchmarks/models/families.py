"""Tiny random models of every family of recurrent layers, dense and with experts; tests run them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, SLOTS = 128, 128
_LINEAR, _FULL = "linear_attention", "full_attention"
_MIXED = [_LINEAR, _FULL, _LINEAR]
_IDS = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_SIZES = _IDS | dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SLOTS
)
_COMMON: dict[str, Any] = _SIZES | dict(num_hidden_layers=len(_MIXED))
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=4,
    layer_types=_MIXED,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_QWEN = _COMMON | _DELTA | dict(head_dim=32, rope_parameters=_ROPE | {"mrope_section": [2, 1, 1]})
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 48}
_MAMBA = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8
)
_GRANITE = _COMMON | _MAMBA | dict(
    shared_intermediate_size=96, layer_types=_MIXED, residual_multiplier=0.22, embedding_multiplier=12, attention_multiplier=0.2,
    logits_scaling=3, position_embedding_type="nope",
)  # fmt: skip
_NEMOTRON = _SIZES | dict(
    head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=24, conv_kernel=4, chunk_size=8, expand=2
)
_NEMOTRON_EXPERTS = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48
)
_LFM2 = _COMMON | dict(conv_L_cache=3, conv_bias=True, layer_types=["conv", _FULL, "conv"])
_ALONE = _IDS | dict(hidden_size=64, num_hidden_layers=2)  # options of models without attention
_MAMBA1 = _ALONE | dict(state_size=8, time_step_rank=8)
_KIMI = _COMMON | dict(
    num_key_value_heads=4, linear_num_heads=4, linear_head_dim=16, layer_types=_MIXED, kv_lora_rank=32, q_lora_rank=None,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, moe_intermediate_size=32, num_local_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1,
)  # fmt: skip
_JAMBA = _COMMON | dict(
    mamba_d_state=8, mamba_dt_rank=8, attn_layer_period=2, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2,
    use_mamba_kernels=False,
)  # fmt: skip
_ZAMBA = _COMMON | dict(
    num_key_value_heads=4, layers_block_type=[_LINEAR, "hybrid", "hybrid"], mamba_d_state=16, mamba_ngroups=2, n_mamba_heads=8,
    chunk_size=8, num_mem_blocks=2, adapter_rank=8, use_shared_attention_adapter=True, use_mem_rope=True,
)  # fmt: skip

# Name → transformers' model type, and its config.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN | _SHARED_EXPERT),
    "qwen3_next": ("qwen3_next", _QWEN | _SHARED_EXPERT | dict(mlp_only_layers=[0], rope_parameters=_ROPE)),
    "olmo_hybrid": ("olmo_hybrid", _COMMON | _DELTA | {"linear_allow_neg_eigval": True}),
    "kimi_linear": ("kimi_linear", _KIMI),
    "lfm2": ("lfm2", _LFM2 | dict(block_multiple_of=32)),
    "lfm2_moe": ("lfm2_moe", _LFM2 | _EXPERTS | {"num_dense_layers": 1}),
    "granite4_h": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0}),
    "granite4_h_moe": ("granitemoehybrid", _GRANITE | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)),
    "bamba": ("bamba", _COMMON | _MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", _COMMON | _MAMBA | dict(num_hidden_layers=2, mamba_d_ssm=128, mamba_rms_norm=False)),
    "nemotron_h": ("nemotron_h", _NEMOTRON | {"layers_block_type": [_LINEAR, "mlp", _FULL, _LINEAR]}),
    "nemotron_h_moe": ("nemotron_h", _NEMOTRON | _NEMOTRON_EXPERTS | {"layers_block_type": [_LINEAR, "moe", _FULL, _LINEAR]}),
    "mamba2": ("mamba2", _ALONE | dict(num_heads=8, head_dim=16, state_size=24, n_groups=2, chunk_size=8)),
    "mamba": ("mamba", _MAMBA1),
    "falcon_mamba": ("falcon_mamba", _MAMBA1),
    "jamba": ("jamba", _JAMBA),
    "zamba2": ("zamba2", _ZAMBA),
}


def family_model(name: str) -> PreTrainedModel:
    """A random model of the family in eval mode. Every parameter is noisy, so that no bias or skip is idle."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of unequal lengths. The second half of each repeats a part of the first, so that drafts come from the text; every
    other one begins with the same message, whose states can be kept."""
    import numpy as np

    rng = np.random.default_rng(seed)
    message = [*rng.integers(3, VOCAB, 20).tolist(), _IDS["eos_token_id"]]
    made = []
    for number in range(count):
        length = int(rng.integers(6, 48))
        ids = rng.integers(3, VOCAB, length).tolist()
        start = int(rng.integers(0, length // 2))
        made.append([*(message if number % 2 else ()), *ids[:40], *ids[start : start + length // 2]])
    return made
