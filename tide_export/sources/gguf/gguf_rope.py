"""The rotary embedding that a GGUF file's keys describe, as llama.cpp computes it.

Formulas: src/llama-context.cpp and `rope_yarn` in ggml/src/ggml-cpu/ops.cpp of https://github.com/ggml-org/llama.cpp;
YaRN: Peng et al. 2023, https://arxiv.org/abs/2309.00071; LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tide_runtime.errors import UnsupportedModelError
from transformers import PreTrainedModel

from tide_export.sources.gguf.gguf_file import GgufTensor
from tide_export.sources.gguf.gguf_metadata import Metadata

FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
WITH_BETAS = ("mistral3",)  # architectures whose file says where YaRN begins and ends, and what it divides attention by
WITH_FREQUENCY_FACTORS = ("llama", "gemma4", "mistral3", "granite", "arcee", "exaone4")
WITH_LONG_FACTORS = ("phi3",)  # architectures; llama.cpp chooses the set by the size of its context, for all texts


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
