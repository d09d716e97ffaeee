"""Tiny random models of every supported architecture, built from configs: no download."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

VOCAB = 128
LAYERS = 4
FEW_LAYERS = 2  # one of each kind, in tests of every architecture: each layer of a trace takes two seconds
MAX_POSITIONS = 128
WINDOW = 8  # shorter than the prompts of the tests

_BASE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITIONS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_MHA = {**_BASE, "num_key_value_heads": 4}
_NO_GQA = {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}
_IDS = dict(bos_token_id=1, eos_token_id=2)
# Of the larger Gemma 4: other heads in layers of full attention, no inputs for each layer.
GEMMA4 = dict(
    **_BASE,
    head_dim=16,
    global_head_dim=32,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    hidden_size_per_layer_input=0,
    final_logit_softcapping=5.0,
)

_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
# Text models with an encoder of images, which has as many layers as they have.
_TEXT = {**_BASE, "num_hidden_layers": 2, "head_dim": 16}
MISTRAL3 = Mistral3Config(
    text_config={"model_type": "mistral", **_TEXT}, vision_config={"model_type": "pixtral", **_VISION}, image_token_index=10
)
GEMMA3 = Gemma3Config(
    text_config={**_TEXT, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    vision_config=_VISION,
    mm_tokens_per_image=4,
    image_token_id=100,
)

STREAMS = 3  # residual streams of a token
# DeepSeek-V4 of layers without an indexer.
DEEPSEEK_V4 = DeepseekV4Config(
    vocab_size=VOCAB,
    hidden_size=64,
    hc_mult=STREAMS,
    hc_sinkhorn_iters=2,
    num_hidden_layers=FEW_LAYERS,
    layer_types=["sliding_attention"] * FEW_LAYERS,
    mlp_layer_types=["moe"] * FEW_LAYERS,
    sliding_window=WINDOW,
    num_attention_heads=4,
    head_dim=16,
    partial_rotary_factor=0.5,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=MAX_POSITIONS,
    pad_token_id=0,
    **_IDS,
)

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_BASE),
    "mistral": lambda: MistralConfig(**_BASE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_BASE),
    "qwen3": lambda: Qwen3Config(**_BASE, head_dim=32),
    "gemma": lambda: GemmaConfig(**_BASE, head_dim=32),
    "gemma2": lambda: Gemma2Config(
        **_BASE, head_dim=32, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_BASE, head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2),
    "gemma4": lambda: Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "phi": lambda: PhiConfig(**_MHA),
    "phi3": lambda: Phi3Config(**_BASE),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=LAYERS, n_head=4, n_positions=MAX_POSITIONS, **_IDS),
    "gpt_neox": lambda: GPTNeoXConfig(**_NO_GQA),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        ffn_dim=128,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        word_embed_proj_dim=32,
        pad_token_id=0,
        **_IDS,
    ),
    "olmo": lambda: OlmoConfig(**_BASE),
    "olmo2": lambda: Olmo2Config(**_BASE),
    "stablelm": lambda: StableLmConfig(**_BASE),
    "starcoder2": lambda: Starcoder2Config(**_BASE, sliding_window=WINDOW),
    "cohere": lambda: CohereConfig(**_BASE, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**_BASE, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=3.0),
    "helium": lambda: HeliumConfig(**_BASE, head_dim=16),
    "falcon": lambda: FalconConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        max_position_embeddings=MAX_POSITIONS,
        **_IDS,
    ),
    "mixtral": lambda: MixtralConfig(**_BASE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_BASE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_BASE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_BASE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
        },
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_MHA,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    ),
}

# Made of parts that others above have too: their tests run in `make test-all`.
SLOW = {
    *(
        "opt",
        "cohere",
        "falcon",
        "mistral",
        "gemma",
        "phi3",
        "gpt_neox",
        "olmo",
        "olmo2",
        "stablelm",
        "starcoder2",
        "granite",
        "helium",
    ),
    *("qwen2_moe", "qwen3_moe"),
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
