"""A tiny config of any causal architecture of the installed transformers: its own defaults, with small sizes.

What an architecture computes stays as its defaults say: kinds of layers, norms, activations, gates, ways to choose experts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from benchmarks.models.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB = 128
POSITIONS = 128
LAYERS = 4
WINDOW = 8
# Names of settings → the size in the place of a larger one; the first that matches the whole name counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab(_size.*)?|encoder_hash_byte_group_vocab", VOCAB),
    (r"(max_)?image_size", 28),
    (r"patch_size", 14),
    (r"(max_position|max_seq|max_(source|target)_pos|model_max_length|context_length|n_positions|n_ctx).*", POSITIONS),
    (r"(num_(hidden|encoder|decoder)_|n_|num_|encoder_|decoder_)layers?|depth|num_blocks", LAYERS),
    (r"num_layers_per_stack|layer_group_size", 2),
    (r".*head_dim|.*d_head|d_kv|kv_channels|attention_head_size|dim_head|mamba_headdim|rotary_dim", 16),
    (r"n_mamba_heads|mamba_num_heads", 8),
    (r"((num|n)_)?(local_|routed_)?experts|moe_num_experts|zero_expert_num", 4),
    (r".*(experts_per_tok(en)?|topk|top_k|moe_k)", 2),
    (r"topk_group", 1),
    (r"n_group|num_expert_group|.*n_groups|mamba_ngroups", 2),
    (r".*(key_value_heads|kv_heads|query_groups|num_key_heads)", 2),
    (r"(.*_)?heads?", 4),
    (r".*_rank", 16),
    (r"(.*_)?(d_state|state_size)", 16),
    (r"sliding_window(_size)?|(attention_)?window_size|local_attention(_window_len)?|attention_chunk_size", WINDOW),
    (r"mamba_d_ssm", 128),
    (r".*chunk_size", 8),
    (r"(.*_)?(moe|expert).*(intermediate_size|ffn_hidden_size)", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_inner|n_inner|dim_ff|feed_forward_size|dff|intermediate_size_mlp)", 96),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (r"hidden_size|d_model|n_embd|(.*_)?emb(ed(ding)?)?_(dim|size)|lru_width|hidden_dim|dim", 64),
)  # fmt: skip


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config; raises whatever transformers raises where the small sizes do not go together."""
    from transformers import CONFIG_MAPPING

    for kind, settings in FAMILIES.values():
        if kind == model_type:
            return CONFIG_MAPPING[kind](**settings)
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**(_small(config_class(**_NEEDED.get(model_type, {}))) | _MORE.get(model_type, {})))


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of ``config`` that are larger than they have to be, and those of its parts."""
    made: dict[str, Any] = {}
    parts = getattr(config, "sub_configs", {})
    values = config.to_dict()
    for name, value in values.items():
        if name in parts:
            part = getattr(config, name)
            made[name] = _small(part) if part is not None and not isinstance(part, dict) else value
        elif name.endswith("_token_id") and isinstance(value, int):
            made[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, value % (VOCAB // 2) + 50)
        elif name.endswith("eos_token_id") and isinstance(value, list):
            made[name] = [2]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
            if value > size:
                made[name] = size
        elif value is None and name in _UNSET:
            made[name] = _UNSET[name]
    if made.get("num_key_value_heads") and values["num_key_value_heads"] == values.get("num_attention_heads"):
        made["num_key_value_heads"] = made["num_attention_heads"]
    if values.get("is_decoder") is False:  # encoders that are a causal model with this setting only
        made["is_decoder"] = True
    return made


_UNSET = {"head_dim": 16, "num_key_value_heads": 4}  # values with which some families compute although they are None
_NEEDED: dict[str, dict[str, Any]] = {"gemma4_assistant": {"hidden_size_per_layer_input": 0}}
_TYPES = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QSA = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=16, indexer_compress_ratio=4)
# Settings that the sizes above need, or without which the class of the config makes no model.
_MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {kind: _ROPE for kind in _TYPES}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _TYPES},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_topk_blocks": 2,
        "index_block_size": 8,
    },
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA | dict(hidden_size=64, head_dim=16, num_hidden_layers=LAYERS, vocab_size=VOCAB)},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
