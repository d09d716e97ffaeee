"""Tiny random models of every supported architecture, built from configs: no download."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 128
LAYERS = 4
FEW_LAYERS = 2  # one of each kind, in tests of every architecture: each layer of a trace takes two seconds
MAX_POSITIONS = 128
WINDOW = 8  # shorter than the prompts of the tests
STREAMS = 3  # residual streams of a token, in DeepSeek-V4

_IDS = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
_SIZES = dict(hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=MAX_POSITIONS)
_BASE: dict[str, Any] = _IDS | _SIZES | dict(intermediate_size=128, num_key_value_heads=2, pad_token_id=0)
_WINDOWS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
# Of the larger Gemma 4: other heads in layers of full attention, no inputs for each layer.
GEMMA4: dict[str, Any] = _BASE | dict(
    head_dim=16, global_head_dim=32, sliding_window=WINDOW, layer_types=_WINDOWS, hidden_size_per_layer_input=0,
    final_logit_softcapping=5.0,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=MAX_POSITIONS // 4,
)  # fmt: skip
# Text models with an encoder of images, which has as many layers as they have.
_TEXT = _BASE | dict(num_hidden_layers=2, head_dim=16)
_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
MISTRAL3 = AutoConfig.for_model(
    "mistral3",
    text_config=_TEXT | dict(model_type="mistral"),
    vision_config=_VISION | dict(model_type="pixtral"),
    image_token_index=10,
)
GEMMA3 = AutoConfig.for_model(
    "gemma3", text_config=_TEXT | dict(sliding_window=WINDOW, layer_types=_WINDOWS[:2]), vision_config=_VISION,
    mm_tokens_per_image=4, image_token_id=100,
)  # fmt: skip
# Of layers without an indexer.
DEEPSEEK_V4 = AutoConfig.for_model(
    "deepseek_v4", **_IDS | _SIZES | _ROUTED | dict(num_hidden_layers=FEW_LAYERS), pad_token_id=0, hc_mult=STREAMS,
    hc_sinkhorn_iters=2, head_dim=16, layer_types=["sliding_attention"] * FEW_LAYERS, mlp_layer_types=["moe"] * FEW_LAYERS,
    sliding_window=WINDOW, partial_rotary_factor=0.5, q_lora_rank=32, o_groups=2, o_lora_rank=16,
)  # fmt: skip

# Model type → settings beside `_BASE`.
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=WINDOW),
    "qwen2": {},
    "qwen3": dict(head_dim=32),
    "gemma": dict(head_dim=32),
    "gemma2": dict(head_dim=32, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2),
    "gemma4_text": GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    "phi": dict(num_key_value_heads=4),
    "phi3": {},
    "gpt2": dict(n_embd=64, n_layer=LAYERS, n_head=4, n_positions=MAX_POSITIONS),
    "gpt_neox": {},
    "opt": dict(ffn_dim=128, word_embed_proj_dim=32),
    "olmo": {},
    "olmo2": {},
    "stablelm": {},
    "starcoder2": dict(sliding_window=WINDOW),
    "cohere": dict(logit_scale=0.25),
    "granite": dict(logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=3.0),
    "helium": dict(head_dim=16),
    "falcon": dict(num_kv_heads=2, new_decoder_architecture=True),
    "mixtral": dict(num_local_experts=4),
    "qwen3_moe": dict(head_dim=32, **_EXPERTS),
    "qwen2_moe": dict(
        **_EXPERTS, shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=WINDOW, layer_types=_WINDOWS
    ),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=_YARN),
    "deepseek_v3": dict(
        **_ROUTED, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=24, first_k_dense_replace=1, n_group=2, topk_group=1,
    ),
}  # fmt: skip
_LACKING = {  # settings of `_BASE` that a family has under another name
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings", "pad_token_id"),
    "gpt_neox": ("num_key_value_heads",),
    "opt": ("intermediate_size", "num_key_value_heads"),
    "falcon": ("intermediate_size", "num_key_value_heads", "pad_token_id"),
}  # fmt: skip


def _config(model_type: str) -> PreTrainedConfig:
    base = {name: value for name, value in _BASE.items() if name not in _LACKING.get(model_type, ())}
    return AutoConfig.for_model(model_type, **base | _SETTINGS[model_type])


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    name.removesuffix("_text"): partial(_config, name) for name in _SETTINGS
}
# Made of parts that others above have too: their tests run in `make test-all`.
SLOW = {
    *("opt", "cohere", "falcon", "mistral", "gemma", "phi3", "gpt_neox", "olmo", "olmo2", "stablelm", "starcoder2", "granite"),
    *("helium", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = LAYERS) -> PreTrainedModel:
    """A random model of the architecture, see `random_model`."""
    config = ARCHITECTURES[name]()
    if layers != LAYERS:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return random_model(config, dtype, seed)


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode, its layers scaled up so that it does not just repeat its input."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):  # the default is near 0, where mixed-up heads would go unnoticed
                parameter.normal_(0.0, 2.0)
            elif parameter.ndim >= 2 and not any(n in parameter_name for n in ("embed", "wte", "wpe", "lm_head")):
                parameter.mul_(8.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model
