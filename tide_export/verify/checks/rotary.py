"""Hold the angles of rotary embeddings against those that the model's file or config describes, computed once more.

A prompt of some tokens does not tell wrong frequencies: low ones turn too little, and the eager model has the same. So the
frequencies of the eager model, and the tables of cos and sin that a bundle's kernels read, are compared at every position.

Formulas: linear scaling; Llama 3 (`rope_freqs` of llama.cpp's converter); YaRN, Peng et al. 2023, https://arxiv.org/abs/2309.00071;
LongRoPE, Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from tide_runtime.bundle.manifest import DRAFT, Manifest
from tide_runtime.errors import VerificationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tide_export.model.long_rotary import BothFactors
from tide_export.sources.gguf.config import LONG_FACTORS, SHORT_FACTORS
from tide_export.sources.gguf.file import GgufTensor, Metadata

Array = NDArray[np.float64]
_TABLES = {"GroupQueryAttention": (7, 8), "RotaryEmbedding": (2, 3)}  # inputs with cos and sin
_REMEDY = "the model was loaded wrongly: please report its config; --no-verify writes the bundle all the same"


@dataclass(frozen=True)
class Rotation:
    """``frequencies`` [D/2] in radians per position; cos and sin are multiplied by ``factor``.

    Position ids from ``original`` on are those of long texts, counted from there, which have the frequencies ``long``.
    """

    frequencies: Array
    factor: float = 1.0
    long: Array | None = None
    original: int = 0

    def angles(self, count: int) -> Array:
        """Those of the first ``count`` position ids, [count, D/2]."""
        places = np.arange(count)[:, None]
        short = places * self.frequencies
        return short if self.long is None else np.where(places < self.original, short, (places - self.original) * self.long)


def gguf_rotations(model: PreTrainedModel, keys: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Rotation]:
    """What the keys say, as llama.cpp computes it, for each of the model's tables of frequencies."""

    def key(name: str, default: Any = None) -> Any:
        value = keys.full(f"{keys.architecture}.{name}")
        return default if value is None else value

    if not _frequencies(model):
        return {}
    heads = key("attention.head_count")
    heads = heads[0] if isinstance(heads, list) else heads
    width = key("rope.dimension_count", key("attention.key_length", key("embedding_length") // heads))
    base = key("rope.freq_base", 10000.0)
    kind = key("rope.scaling.type", "linear")
    factor = key("rope.scaling.factor", key("rope.scale_linear", 0.0)) or 1.0
    if kind == "yarn":
        original = key("rope.scaling.original_context_length", key("context_length"))
        growth = 0.1 * math.log(factor)
        scale = key("rope.scaling.attn_factor", 1.0) * (1 + growth) / (1 + key("rope.scaling.yarn_log_multiplier", 0.0) * growth)
        fast, slow = key("rope.scaling.yarn_beta_fast", 32.0), key("rope.scaling.yarn_beta_slow", 1.0)
        scaled = Rotation(_yarn(base, width, factor, original, fast, slow, truncate=True), scale)
    else:
        scaled = Rotation(_plain(base, width) / (factor if kind == "linear" else 1.0))
    if (long := tensors.get(LONG_FACTORS)) is not None:
        original = key("rope.scaling.original_context_length", key("context_length"))
        plain = _plain(base, width)
        short = np.asarray(tensors[SHORT_FACTORS].data, np.float64)
        scale = key("rope.scaling.attn_factor", 1.0)
        scaled = Rotation(plain / short, scale, plain / np.asarray(long.data, np.float64), original)
    local_base = key("rope.freq_base_swa", base if keys.architecture == "olmo2" else 10000.0)
    local = Rotation(_plain(local_base, key("rope.dimension_count_swa", width)))
    found = {name: local if "sliding" in name else scaled for name in _frequencies(model)}
    if (divisors := tensors.get("rope_freqs.weight")) is None:
        return found
    factors = np.asarray(divisors.data, np.float64)
    divided = Rotation(scaled.frequencies / factors, scaled.factor)
    return {name: divided if one is scaled else one for name, one in found.items()}


def config_rotations(model: PreTrainedModel) -> dict[str, Rotation]:
    """The same of a config of transformers, but for kinds of scaling that are not computed here."""
    text = model.config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    found = {}
    for name, frequencies in _frequencies(model).items():
        kind = next((kind for kind in parameters if kind in name), None)
        own = parameters[kind] if kind is not None else parameters
        if kind is None and (theta := _theta_of_layers(model, name, text)) is not None:
            own = {**own, "rope_theta": theta}
        longest = getattr(text, "max_position_embeddings", 0)
        rotation = _of_config(own, _width(text, own, len(frequencies)), longest) if "rope_theta" in own else None
        if rotation is not None:
            found[name] = rotation
    return found


def _theta_of_layers(model: PreTrainedModel, name: str, text: PreTrainedConfig) -> float | None:
    """The base of a module whose config is a copy with one of the bases that the model's config lists by layer."""
    own = getattr(model.get_submodule(name.rpartition(".")[0]), "config", None)
    theta = (getattr(own, "rope_parameters", None) or {}).get("rope_theta")
    return theta if theta in (getattr(text, "layer_rope_theta", None) or ()) else None


def _width(text: PreTrainedConfig, parameters: Mapping[str, Any], count: int) -> int:
    """Channels that ``count`` frequencies rotate: an odd number where a share of the head's width is one."""
    head = text.to_dict().get("head_dim") or 0  # as an attribute it is an error where it differs by layer
    rotated = int(head * parameters.get("partial_rotary_factor", 1.0))
    return rotated if rotated == 2 * count - 1 else 2 * count


def _frequencies(model: PreTrainedModel) -> dict[str, Array]:
    return {n: b.double().numpy() for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n}


def _of_config(parameters: Mapping[str, Any], width: int, longest: int) -> Rotation | None:
    base = parameters["rope_theta"]
    kind = parameters.get("rope_type", "default")
    factor = parameters.get("factor")
    plain = _plain(base, width)
    original = parameters.get("original_max_position_embeddings")
    if kind == "default":
        return Rotation(plain)
    if kind == "proportional":
        turned = int(parameters.get("partial_rotary_factor", 1.0) * width // 2)
        return Rotation(np.where(np.arange(width // 2) < turned, plain / (factor or 1.0), 0.0))
    if factor is not None and kind == "linear":
        return Rotation(plain / factor)
    if factor is not None and original and kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        share = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return Rotation((1 - share) * plain / factor + share * plain)
    if factor is not None and original and kind == "yarn" and not parameters.get("mscale"):
        scale = parameters.get("attention_factor") or (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
        fast, slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0
        return Rotation(_yarn(base, width, factor, original, fast, slow, parameters.get("truncate", True)), scale)
    if original and kind == "longrope":
        extension = factor or longest / original
        usual = math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0
        scale = usual if parameters.get("attention_factor") is None else parameters["attention_factor"]
        short, long = (plain / np.array(parameters[f"{length}_factor"]) for length in ("short", "long"))
        return Rotation(short, scale, long, original)
    return None


def _plain(base: float, width: int) -> Array:
    return float(base) ** -(np.arange(0, width, 2) / width)


def _yarn(base: float, width: int, factor: float, original: int, fast: float, slow: float, truncate: bool) -> Array:
    """Frequencies that turn more than ``fast`` times in the ``original`` context stay, those below ``slow`` are interpolated."""
    first, last = (width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    ramp = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    plain = _plain(base, width)
    return plain / factor * ramp + plain * (1 - ramp)


def check_eager(model: PreTrainedModel, rotations: Mapping[str, Rotation]) -> None:
    """Raise VerificationError where the model has other frequencies."""
    for name, found in _frequencies(model).items():
        module = model.get_submodule(name.rpartition(".")[0])
        wanted = rotations.get(name)
        if wanted is not None and not (_equal(found, wanted.frequencies, 1e-5) and _has_long(module, wanted)):
            raise VerificationError(f"rotary embedding: {name} of the model is not what its file describes; {_REMEDY}")


def _has_long(rotary: nn.Module, rotation: Rotation) -> bool:
    """Whether the module has the long frequencies and the factor of ``rotation``, if that has any."""
    if rotation.long is None:
        return True
    long = BothFactors(rotary, rotation.original).long
    same_factor = math.isclose(long.attention_scaling, rotation.factor, rel_tol=1e-6)
    return same_factor and _equal(long.inv_freq.double().numpy(), rotation.long, 1e-5)


def check_tables(directory: Path, manifest: Manifest, rotations: Mapping[str, Rotation]) -> None:
    """Raise VerificationError where a table of the bundle has other angles at any position; those of a draft head are its own."""
    others = ("head", "exit_", DRAFT)
    graphs = (item for target in manifest.targets.values() for item in target.graphs.items())
    for file in sorted({file for name, file in graphs if file.endswith(".onnx") and not name.startswith(others)}):
        for tables in _tables(directory / file):
            fitting = [one for one in rotations.values() if tables[0].shape[-1] == len(one.frequencies)]
            if fitting and not any(_tabulates(tables, one) for one in fitting):
                raise VerificationError(f"rotary embedding: {file} has other angles than the model's file describes; {_REMEDY}")


def _tables(file: Path) -> Iterator[tuple[NDArray, NDArray]]:
    """cos and sin, [slots, D/2], of each pair that the graph reads."""
    graph = onnx.load(file, load_external_data=False).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    pairs = set()
    for node in graph.node:
        at = _TABLES.get(node.op_type, ())
        if at and len(node.input) > at[1] and node.input[at[0]] in stored:
            pairs.add((node.input[at[0]], node.input[at[1]]))
    for cos, sin in sorted(pairs):
        yield numpy_helper.to_array(stored[cos], str(file.parent)), numpy_helper.to_array(stored[sin], str(file.parent))


def _tabulates(tables: tuple[NDArray, NDArray], rotation: Rotation) -> bool:
    angles = rotation.angles(len(tables[0]))
    tolerance = 2e-3 if tables[0].dtype == np.float16 else 1e-5 + 2.0**-23 * len(angles)  # fp32 angles of the last position
    wanted = rotation.factor * np.cos(angles), rotation.factor * np.sin(angles)
    return all(_equal(found, one, tolerance, absolute=True) for found, one in zip(tables, wanted, strict=True))


def _equal(found: NDArray, wanted: NDArray, tolerance: float, absolute: bool = False) -> bool:
    if found.shape != wanted.shape:
        return False
    size = 1.0 if absolute else np.abs(wanted)
    return bool((np.abs(found - wanted) <= tolerance * size).all())
