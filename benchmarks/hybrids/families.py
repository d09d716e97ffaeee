"""Tiny random models of every family of recurrent layers, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB, SLOTS = 128, 128
_LINEAR, _FULL = "linear_attention", "full_attention"
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=SLOTS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=4,
    layer_types=[_LINEAR, _LINEAR, _LINEAR, _FULL],
)  # fmt: skip
_QWEN = _COMMON | _DELTA | {
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_MAMBA = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_GRANITE = _COMMON | _MAMBA | dict(
    shared_intermediate_size=96, layer_types=[_LINEAR, _FULL, _LINEAR, _LINEAR], residual_multiplier=0.22,
    embedding_multiplier=12, attention_multiplier=0.2, logits_scaling=3, position_embedding_type="nope",
)  # fmt: skip
_NEMOTRON = {k: v for k, v in _COMMON.items() if k != "num_hidden_layers"} | dict(
    head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=24, conv_kernel=4, chunk_size=8, expand=2
)
_LFM2 = _COMMON | dict(conv_L_cache=3, layer_types=["conv", "conv", _FULL, "conv"])
_MAMBA2 = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)

# Name → transformers' model type, and its config.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN | _EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3_next": ("qwen3_next", _QWEN | _EXPERTS | {"shared_expert_intermediate_size": 48}),
    "olmo_hybrid": ("olmo_hybrid", _COMMON | _DELTA | {"linear_allow_neg_eigval": True}),
    "lfm2": ("lfm2", _LFM2 | dict(conv_bias=True, block_multiple_of=32)),
    "lfm2_moe": ("lfm2_moe", _LFM2 | _EXPERTS | {"num_dense_layers": 1}),
    "granite4_h": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0}),
    "granite4_h_moe": ("granitemoehybrid", _GRANITE | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)),
    "bamba": ("bamba", _COMMON | _MAMBA | {"attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", _COMMON | _MAMBA | dict(mamba_d_ssm=128, mamba_rms_norm=False)),
    "nemotron_h": ("nemotron_h", _NEMOTRON | {"layers_block_type": [_LINEAR, "mlp", _FULL, _LINEAR]}),
    "nemotron_h_moe": (
        "nemotron_h",
        _NEMOTRON
        | dict(
            layers_block_type=[_LINEAR, "moe", _FULL, _LINEAR],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
        ),
    ),
    "mamba2": ("mamba2", _MAMBA2 | dict(num_heads=8, head_dim=16, state_size=24, n_groups=2, chunk_size=8)),
}


def write_family(name: str, folder: Path) -> None:
    """The model as a HuggingFace folder. Every parameter is noisy, so that no bias or skip is idle."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of unequal lengths. The second half of each repeats a part of the first, so that drafts come from the text; every
    other one begins with the same message, whose states can be kept."""
    import numpy as np

    rng = np.random.default_rng(seed)
    message = [*rng.integers(3, VOCAB, 20).tolist(), _COMMON["eos_token_id"]]
    made = []
    for number in range(count):
        length = int(rng.integers(6, 48))
        ids = rng.integers(3, VOCAB, length).tolist()
        start = int(rng.integers(0, length // 2))
        made.append([*(message if number % 2 else ()), *ids[:40], *ids[start : start + length // 2]])
    return made
