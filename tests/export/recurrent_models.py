"""Tiny random models with recurrent layers, built from configs, and their bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tide_runtime.bundle.manifest import Manifest
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tide_export.config import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

VOCAB = 128
MAX_POSITIONS = 128

_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, **_IDS)
_BASE = dict(**_SIZES, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS)
_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"],
)
_MAMBA = dict(
    mamba_n_heads=8,
    mamba_n_groups=2,
    mamba_d_state=24,
    mamba_d_head=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=8,
)
_QWEN = dict(**_BASE, **_DELTA, head_dim=32)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_GRANITE = dict(
    **_BASE,
    **_MAMBA,
    shared_intermediate_size=96,
    layer_types=["linear_attention", "full_attention"],
    residual_multiplier=0.22,
    embedding_multiplier=12,
    attention_multiplier=0.2,
    logits_scaling=3,
    position_embedding_type="nope",
)
_LFM = dict(**_BASE, conv_L_cache=3, conv_bias=True, layer_types=["conv", "full_attention"])
_NEMOTRON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_POSITIONS,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=24,
    conv_kernel=4,
    chunk_size=8,
    expand=2,
    **_IDS,
)


def _rope(partial: float = 1.0) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial}


RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: transformers.Lfm2Config(**_LFM, block_multiple_of=32),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **_LFM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_QWEN, rope_parameters=_rope(0.25) | {"mrope_section": [2, 1, 1]}),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **_QWEN, **_EXPERTS, rope_parameters=_rope(0.25) | {"mrope_section": [2, 1, 1]}
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_QWEN, **_EXPERTS, mlp_only_layers=[0], decoder_sparse_step=1, rope_parameters=_rope(0.25)
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**_BASE, **_DELTA, linear_allow_neg_eigval=True),
    "granite4_h": lambda: transformers.GraniteMoeHybridConfig(**_GRANITE, num_local_experts=0),
    "granite4_h_moe": lambda: transformers.GraniteMoeHybridConfig(**_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "bamba": lambda: transformers.BambaConfig(**_BASE, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **_BASE | dict(num_hidden_layers=1), **_MAMBA, mamba_d_ssm=128, mamba_rms_norm=False
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(**_NEMOTRON, layers_block_type=["mamba", "mlp", "attention"]),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=24,
        n_groups=2,
        chunk_size=8,
        **_IDS,
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=8, **_IDS
    ),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=8, **_IDS
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_BASE,
        mamba_d_state=8,
        mamba_dt_rank=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        use_mamba_kernels=False,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **{**_BASE, "num_key_value_heads": 4},
        linear_num_heads=4,
        linear_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    ),
}


def tiny_recurrent_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of the family in eval mode; all its parameters are noisy, so that no bias or skip is idle."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(RECURRENT[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_recurrent_bundle(name: str, directory: Path, weights: str = "source", verify: bool = True) -> Manifest:
    """Export the tiny model of the family into ``directory``, which exists; ``weights`` as `ExportConfig.weights`."""
    progress = ExportProgress(quiet=True)
    config = ExportConfig(weights=weights, max_seq_len=MAX_POSITIONS, targets=("cpu",), verify=verify)
    loaded = quantize_loaded(LoadedModel(tiny_recurrent_model(name), None, name), weights, config.quantizer, progress)
    return write_bundle(loaded, directory, config, progress)[0]
