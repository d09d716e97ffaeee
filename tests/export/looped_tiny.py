"""Tiny random looped models: Ouro and Nanbeige by the exporter's own classes, and one whose code comes with it."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tide_export.model.looped_models import NanbeigeConfig, OuroConfig

VOCAB = 128
# Stored layers and loops; of 5 layers an export traces 3 in each loop.
FORMS = {"ouro": (1, 3), "nanbeige": (5, 2), "own": (2, 2)}
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)


def ouro(**more: object) -> OuroConfig:
    layers, loops = FORMS["ouro"]
    return OuroConfig(**{**_SIZES, "num_hidden_layers": layers, "total_ut_steps": loops, **more})


def nanbeige(**more: object) -> NanbeigeConfig:
    layers, loops = FORMS["nanbeige"]
    own = {"num_hidden_layers": layers, "num_loops": loops, "num_key_value_heads": 2, "head_dim": 16}
    return NanbeigeConfig(**{**_SIZES, **own, **more})


def made(config: OuroConfig | NanbeigeConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # weights of one would hide a norm that is left out or done twice
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def saved(form: str, folder: Path) -> Path:
    """A checkpoint; of ``own`` with its code."""
    if form != "own":
        made(ouro() if form == "ouro" else nanbeige()).save_pretrained(folder)
        return folder
    folder.mkdir(exist_ok=True)
    (folder / "configuration_spiral.py").write_text(_CONFIGURATION)
    (folder / "modeling_spiral.py").write_text(_MODELING)
    names = {"AutoConfig": "configuration_spiral.SpiralConfig", "AutoModelForCausalLM": "modeling_spiral.SpiralForCausalLM"}
    layers, loops = FORMS[form]
    first = NanbeigeConfig(**_SIZES, num_hidden_layers=layers, auto_map=names, turns=loops).to_dict()
    (folder / "config.json").write_text(json.dumps(first | {"model_type": "spiral"}))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
    model.save_pretrained(folder)
    return folder


_CONFIGURATION = """
from transformers import LlamaConfig


class SpiralConfig(LlamaConfig):
    model_type = "spiral"
    turns: int = 1
"""
# Its layers know the loop by an attribute, it has no norm between loops, and it replaces a cache that is too small.
_MODELING = """
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_spiral import SpiralConfig


class SpiralModel(LlamaModel):
    config_class = SpiralConfig

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs):
        hidden, cache = self.embed_tokens(input_ids), past_key_values
        needed = self.config.turns * len(self.layers)
        grows = cache is not None and cache.layer_class_to_replicate is not None
        if use_cache and (cache is None or not grows and len(cache.layers) < needed):
            cache = DynamicCache()
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = seen + torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(self.config, hidden, attention_mask, cache, position_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for turn in range(self.config.turns):
            for place, layer in enumerate(self.layers):
                layer.self_attn.layer_idx = turn * len(self.layers) + place
                hidden = layer(hidden, attention_mask=mask, past_key_values=cache, position_embeddings=rotary, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=cache)


class SpiralForCausalLM(LlamaForCausalLM):
    config_class = SpiralConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = SpiralModel(config)
        self.post_init()
"""
