"""Drafters as public tools save them: an EAGLE-3 folder (SpecForge's names), and a MiMo checkpoint with an MTP layer.

MiMo's model is Qwen2's: a Llama with biases, here of zero.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from tide_export.drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from tide_export.drafters.mtp import MtpDrafter
from tide_export.load import LoadedModel

_LAYER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_parameters", "max_position_embeddings", "vocab_size", "hidden_act", "attention_bias"),
)
_MTP = "model.mtp_layers.0."
_MIMO_NAMES = {
    "eh_proj": "input_proj",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "post_norm": "final_layernorm",
}


def new_eagle3(loaded: LoadedModel, taps: tuple[int, ...], vocabulary: Tensor, seed: int) -> Eagle3Drafter:
    """An untrained head for a Llama, that guesses among the tokens ``vocabulary`` [N]."""
    torch.manual_seed(seed)
    config = LlamaConfig(**_layer_config(loaded), num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    settings = Eagle3Settings(config, config.hidden_size, len(vocabulary), taps, True, False, False, False, False)
    drafter = Eagle3Drafter(settings, taps, vocabulary, (), loaded.model.get_input_embeddings(), None, loaded.model.dtype)
    drafter.norm.weight.data.copy_(loaded.model.get_decoder().norm.weight)
    drafter.lm_head.weight.data.copy_(loaded.model.get_output_embeddings().weight[vocabulary])
    return drafter.eval()


def write_eagle3(drafter: Eagle3Drafter, loaded: LoadedModel, folder: Path) -> None:
    """Save the head as SpecForge does."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    vocabulary = state.pop("vocabulary")
    del state["embed_tokens.weight"]
    vocab_size = loaded.model.config.vocab_size
    state["d2t"] = vocabulary - torch.arange(len(vocabulary))
    state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    save_file(state, folder / "model.safetensors")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **_layer_config(loaded)}
    config |= {"num_hidden_layers": 1, "draft_vocab_size": len(vocabulary)}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(drafter.taps)}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _layer_config(loaded: LoadedModel) -> dict[str, Any]:
    return {name: getattr(loaded.model.config, name) for name in _LAYER}


def write_mimo(loaded: LoadedModel, source: Path, folder: Path) -> None:
    """Save a Llama as a MiMo checkpoint with an untrained MTP layer, whose block is a copy of the last layer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = loaded.model.config
    state = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items() if name != "lm_head.weight"}
    assert config.tie_word_embeddings
    last = f"model.layers.{config.num_hidden_layers - 1}."
    for layer in range(config.num_hidden_layers):
        for part, heads in (
            ("q", config.num_attention_heads),
            ("k", config.num_key_value_heads),
            ("v", config.num_key_value_heads),
        ):
            state[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.zeros(heads * config.head_dim)
    block = {_MTP + name.removeprefix(last): tensor.clone() for name, tensor in state.items() if name.startswith(last)}
    eye = torch.eye(config.hidden_size)
    block[f"{_MTP}input_proj.weight"] = torch.cat([eye, 0.1 * eye], 1)  # the state, then the token
    for name in ("token_layernorm", "hidden_layernorm"):
        block[f"{_MTP}{name}.weight"] = torch.ones(config.hidden_size)
    block[f"{_MTP}final_layernorm.weight"] = state["model.norm.weight"].clone()
    save_file(state | block, folder / "model.safetensors", {"format": "pt"})
    settings = {**config.to_dict(), "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)


def trainable(drafter: MtpDrafter) -> None:
    """Ask for gradients of the layer; embedding, head and final norm are the model's."""
    for module in (drafter.mtp.layers, drafter.own_norm):
        module.requires_grad_(True)


def write_mtp(drafter: MtpDrafter, folder: Path) -> None:
    """Save the layer into the checkpoint in ``folder``, under MiMo's names."""
    file = folder / "model.safetensors"
    layer: nn.Module = drafter.mtp.layers[0]
    trained = {}
    for name, tensor in layer.state_dict().items():
        part, rest = name.split(".", 1)
        trained[f"{_MTP}{_MIMO_NAMES[part]}.{rest}" if part in _MIMO_NAMES else _MTP + rest] = tensor.contiguous()
    stored = load_file(file)
    assert trained.keys() <= stored.keys()
    save_file(stored | trained, file, {"format": "pt"})
