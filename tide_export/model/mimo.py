"""MiMo (Xiaomi 2025, arXiv:2505.07608) for transformers, which has no class for it: a Qwen2 model with MTP layers beside it.

With the class registered, an export of XiaomiMiMo/MiMo-7B-RL runs none of its code, and ``--draft-head mtp`` reads its MTP layer.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
    config: MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
