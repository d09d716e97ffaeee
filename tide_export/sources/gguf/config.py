"""What the keys of a GGUF file say of its model's config, whatever the architecture: sizes, heads, rotary embedding, pooling.

Rotary embedding: src/llama-context.cpp and `rope_yarn` in ggml/src/ggml-cpu/ops.cpp of https://github.com/ggml-org/llama.cpp;
YaRN: Peng et al. 2023, https://arxiv.org/abs/2309.00071; LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from typing import Any

import numpy as np
import torch
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tide_export.sources.gguf.file import REQUIRED, GgufTensor, Metadata

FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
WITH_BETAS = ("mistral3",)  # architectures whose file says where YaRN begins and ends, and what it divides attention by
WITH_FREQUENCY_FACTORS = ("llama", "gemma4", "mistral3", "granite", "arcee", "exaone4")
WITH_LONG_FACTORS = ("phi3",)  # architectures; llama.cpp chooses the set by the size of its context, for all texts
FEED_FORWARD = "feed_forward_length"
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    FEED_FORWARD: "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
RMS_EPSILON = "attention.layer_norm_rms_epsilon"

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How an architecture's keys become a config.

    Args:
        model_type: transformers' name of it; ``more`` may give another.
        flags: config attribute → the tensor that a file with it has, in the layer * in any. With _ in front: how many tensors.
        epsilon: the key of the norms' epsilon, and the config's attribute.
        partial_rotary: whether a part of each head may rotate.
        rotates: whether queries and keys rotate at all.
        scales: whether ``more`` takes the scale of scores; else it is 1/√head_dim.
        windows: whether ``more`` takes the sliding window; else every layer attends to the whole context.
        sizes: keys of widths, and the config's attributes; ``more`` takes the others.
        heads: whether the heads of all layers are alike; else ``more`` takes them.
        mixed: whether layers may be without attention or feed-forward block, and all without the width of the latter.
        keys: config attribute → the key that has its value.
        more: what else the architecture's keys say: (keys, values so far) → values.
    """

    model_type: str
    flags: Mapping[str, str] = field(default_factory=dict)
    epsilon: tuple[str, str] = (RMS_EPSILON, "rms_norm_eps")
    partial_rotary: bool = False
    rotates: bool = True
    scales: bool = False
    windows: bool = False
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    heads: bool = True
    mixed: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Metadata, Values], Values] = lambda keys, values: {}

    def config(self, keys: Metadata, tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
        """The config of a file. Raises ModelFilesError and UnsupportedModelError as `architectures.read_config` does."""
        values: Values = {
            attribute: keys.take_number(key, 0 if self.mixed and key == FEED_FORWARD else REQUIRED, self.mixed)
            for key, attribute in self.sizes.items()
        }
        values[self.epsilon[1]] = keys.take(self.epsilon[0])
        values["vocab_size"] = _vocabulary(keys, tensors)
        values["tie_word_embeddings"] = "output.weight" not in tensors
        for attribute, tensor in self.flags.items():
            count = len(matching(tensors, tensor))
            values[attribute] = count if attribute.startswith("_") else count > 0
        values |= _token_ids(keys, values["vocab_size"])
        if self.heads:
            values |= self._heads(keys, values, tensors)
        values |= {attribute: keys.take(key) for attribute, key in self.keys.items()}
        values |= self.more(keys, values)
        keys.check_all_taken()
        return AutoConfig.for_model(values.pop("model_type", self.model_type), **values)

    def _heads(self, keys: Metadata, values: Values, tensors: Mapping[str, GgufTensor]) -> Values:
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        if not heads or (hidden % heads and keys.take("attention.key_length", None) is None):
            raise UnsupportedModelError(
                f"{keys.file}: its embedding length {hidden} is no multiple of the number of attention heads ({heads})"
            )
        head_dim = keys.take_number("attention.key_length", hidden // heads)
        if keys.take_number("attention.value_length", head_dim) != head_dim:
            raise keys.refused("attention.value_length", "differs from the keys' length, and the model has one length for both")
        if keys.architecture == "stablelm" and head_dim * heads != hidden:
            raise keys.refused("attention.key_length", f"is not {hidden} / {heads}, the only length that the model has")
        scale = None if self.scales else keys.take("attention.scale", None)
        if scale and abs(scale * head_dim**0.5 - 1) > 1e-4:
            raise keys.refused("attention.scale", f"is not 1/√{head_dim}, and the model has no other")
        if not self.windows:
            check_whole_context(keys, values)
        found = {
            "num_key_value_heads": keys.take_number("attention.head_count_kv", heads, self.mixed),
            "head_dim": head_dim,
        }
        if self.rotates:
            return {**found, "rope_parameters": rope_parameters(keys, head_dim, self.partial_rotary, tensors)}
        keys.take_all("rope.")
        return found


def _vocabulary(keys: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelFilesError(f"{keys.file} has no tensor token_embd.weight, the embedding; download it again")
    rows = tensors["token_embd.weight"].shape[0]
    if keys.take("vocab_size", rows) != rows:
        raise ModelFilesError(
            f"{keys.file} has {keys.architecture}.vocab_size = {keys.take('vocab_size')} and an embedding of {rows} tokens; "
            "convert the model again"
        )
    return rows


def _token_ids(keys: Metadata, vocabulary: int) -> Values:
    """Ids of the config; an id beyond the vocabulary has no row that could be looked up."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {attribute: keys.full(f"tokenizer.ggml.{name}_token_id") for attribute, name in names.items()}
    return {attribute: number if number is not None and number < vocabulary else None for attribute, number in ids.items()}


def check_whole_context(keys: Metadata, values: Values) -> None:
    window = keys.take("attention.sliding_window", 0)
    if window and window < values["max_position_embeddings"]:
        raise keys.refused("attention.sliding_window", "is shorter than the context, and the model attends to all of it")


def rope_parameters(keys: Metadata, head_dim: int, partial: bool, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """transformers' ``rope_parameters``. ``partial``: whether the model can rotate a part of each head.

    Raises UnsupportedModelError for what they cannot say.
    """
    rotated = keys.take("rope.dimension_count", head_dim)
    found = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name in tensors and keys.architecture in WITH_LONG_FACTORS]
    if len(found) == 1:
        raise UnsupportedModelError(f"{keys.file} has the tensor {found[0]} without its counterpart; convert the model again")
    scaling = _longrope(keys, rotated, tensors) if found else _scaling(keys)
    parameters = {"rope_theta": float(keys.take("rope.freq_base", 10000.0)), **scaling}
    share = rotated / head_dim
    if (share != 1 and not partial) or int(head_dim * share) != rotated:
        raise keys.refused("rope.dimension_count", f"is not the head's width {head_dim}, and the model rotates whole heads")
    return {**parameters, "partial_rotary_factor": share} if partial else parameters


def _scaling(keys: Metadata) -> dict[str, Any]:
    kind = keys.take("rope.scaling.type", "linear")
    factor = keys.take("rope.scale_linear", 0.0)  # the name of the first GGUF files
    factor = float(keys.take("rope.scaling.factor", factor)) or 1.0
    attention = keys.take("rope.scaling.attn_factor", 1.0)
    divisor = keys.take("rope.scaling.yarn_log_multiplier", 0.0) if keys.architecture in WITH_BETAS else 0.0
    mixed = keys.take("rope.scaling.yarn_ext_factor", -1.0)  # below 0: 1 for YaRN, else 0
    if kind not in ("none", "linear", "yarn"):
        raise keys.refused(
            "rope.scaling.type", f"is none of none, linear and yarn; longrope has the tensors {LONG_FACTORS} and {SHORT_FACTORS}"
        )
    if kind == "none" and factor != 1.0:
        raise keys.refused("rope.scaling.factor", "is one of no scaling, which llama.cpp applies in some layers only")
    if mixed not in ((1.0,) if kind == "yarn" else (0.0,)) and mixed >= 0:
        raise keys.refused("rope.scaling.yarn_ext_factor", f"mixes frequencies in another way than {kind} does")
    if kind == "yarn" and factor < 1.0:
        raise keys.refused("rope.scaling.factor", "is below 1, which shortens the context")
    if kind == "yarn" and (factor, attention) != (1.0, 1.0):
        original = keys.take("rope.scaling.original_context_length", keys.take("context_length"))
        spread = attention * (1 + 0.1 * math.log(factor)) / (1 + 0.1 * divisor * math.log(factor))
        scaled = {"factor": factor, "original_max_position_embeddings": original, "attention_factor": spread}
        return {"rope_type": "yarn", **scaled, **_betas(keys)}
    if attention != 1.0:
        raise keys.refused("rope.scaling.attn_factor", f"scales attention, which {kind} scaling of the model does not")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {"rope_type": "default"}


def _betas(keys: Metadata) -> dict[str, float]:
    usual = {"beta_fast": 32.0, "beta_slow": 1.0}
    if keys.architecture not in WITH_BETAS:
        return usual
    return {name: float(keys.take(f"rope.scaling.yarn_{name}", value)) for name, value in usual.items()}


def _longrope(keys: Metadata, rotated: int, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """llama.cpp's converter writes no scaling type; one that scales positions would apply besides the factors."""
    if keys.take("rope.scaling.type", "longrope") not in ("none", "linear", "longrope"):
        raise keys.refused("rope.scaling.type", f"is not what {LONG_FACTORS} belongs to")
    for name, usual in (("rope.scaling.factor", (0.0, 1.0)), ("rope.scale_linear", (0.0, 1.0))):
        if keys.take(name, 0.0) not in usual:
            raise keys.refused(name, f"scales positions besides {LONG_FACTORS}")
    if keys.take("rope.scaling.yarn_ext_factor", -1.0) > 0:
        raise keys.refused("rope.scaling.yarn_ext_factor", "mixes frequencies in another way than longrope does")
    long, short = (np.asarray(tensors[name].data, np.float32) for name in (LONG_FACTORS, SHORT_FACTORS))
    if not long.shape == short.shape == (rotated // 2,):
        raise UnsupportedModelError(
            f"{keys.file}: {LONG_FACTORS} has {long.size} factors and {SHORT_FACTORS} {short.size}, expected {rotated // 2}, "
            "half the rotated channels; export the HuggingFace checkpoint that the file was made from"
        )
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "attention_factor": float(keys.take("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": keys.take_number("rope.scaling.original_context_length", keys.take("context_length")),
    }


def without_effect(name: str, architecture: str) -> bool:
    """Whether no parameter is made of the tensor ``name``: rotary frequencies, which llama.cpp skips, and their factors.

    What llama.cpp divides frequencies by is applied where the model is made.
    """
    divides = name == FREQUENCY_FACTORS and architecture in WITH_FREQUENCY_FACTORS
    extends = name in (LONG_FACTORS, SHORT_FACTORS) and architecture in WITH_LONG_FACTORS
    return name.endswith("attn_rot_embd.weight") or divides or extends


def divide_frequencies(model: PreTrainedModel, factors: torch.Tensor) -> None:
    """Divide the rotary frequencies [D/2] by ``factors``, as Llama 3.1's file stores its scaling: Gemma 4's of full layers."""
    found = [
        (module, name)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name in ("inv_freq", "full_attention_inv_freq")
    ]
    if not found or any(getattr(module, name).shape != factors.shape for module, name in found):
        raise UnsupportedModelError(
            f"{FREQUENCY_FACTORS} has {factors.numel()} factors, for other rotary frequencies than {type(model).__name__} has; "
            "export the HuggingFace checkpoint that the file was made from"
        )
    for module, name in found:
        divided = getattr(module, name) / factors
        setattr(module, name, divided)
        setattr(module, name.replace("inv_freq", "original_inv_freq"), divided)


_NONE = 0
_POOLINGS = {1: "mean", 3: "last"}
_REFUSED = {
    2: "it pools by cls, and TIDE compiles mean and last; take an embedding model that pools so, such as Qwen3-Embedding",
    4: "it ranks texts by a classifier, which TIDE does not compile; of a causal language model that answers yes or no, such as "
    "Qwen3-Reranker, export the HuggingFace checkpoint, and compare the two tokens' log-probabilities",
}


def read_pooling(keys: Metadata) -> EmbeddingInfo | None:
    """How the file's model embeds texts; None where it writes text. The format has no key for a prompt or for shorter vectors.

    Vectors are normalised: no key says whether, and llama.cpp's are. Raises UnsupportedModelError for other poolings.
    """
    pooling = keys.take("pooling_type", _NONE)
    if pooling == _NONE:
        return None
    if pooling not in _POOLINGS:
        why = _REFUSED.get(pooling, "no such pooling is known; convert the model again, or export its HuggingFace checkpoint")
        raise UnsupportedModelError(f"{keys.file} has {keys.architecture}.pooling_type = {pooling}: {why}")
    return EmbeddingInfo(_POOLINGS[pooling], normalized=True)
