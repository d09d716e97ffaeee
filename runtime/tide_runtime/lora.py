"""LoRA adapters as PEFT saves them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

A module with the weight W [N, K] gets W + scale · B A, with B [N, r] and A [r, K] (Hu et al. 2021, arXiv:2106.09685); the scale
is alpha / r, or alpha / √r where ``use_rslora`` is set (Kalajdzievski 2023, arXiv:2312.03732).

What an adapter holds beside such pairs changes the model in other ways, so an adapter with anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import AdapterError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
# Settings that say how the matrices were made, or that are read below. Others are refused where they are set.
_READ = frozenset({"peft_type", "lora_alpha", "use_rslora", "alpha_pattern", "bias", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
})  # fmt: skip
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")  # other ways to begin change the model's own weights
_FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


class LowRank(NamedTuple):
    """``down`` [r, K] and ``up`` [N, r], float32; ``up`` is scaled."""

    down: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter's matrices by module; ``digest``: of its folder's content."""

    name: str
    digest: str
    modules: Mapping[str, LowRank]

    @classmethod
    def read(cls, name: str, folder: Path) -> LoraAdapter:
        """Read the adapter in ``folder``. Raises AdapterError where it is broken or holds more than pairs of matrices."""
        texts = [_content(name, folder / file) for file in (CONFIG, TENSORS)]
        try:
            config = json.loads(texts[0])
        except ValueError as error:
            raise AdapterError(f"{CONFIG} of adapter {name} is no JSON ({error}); save the adapter again") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{CONFIG} of adapter {name} holds no settings; save the adapter again")
        _check_settings(name, config)
        digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
        return cls(name, digest, _modules(name, config, _tensors(name, texts[1])))


def read_adapters(folders: Mapping[str, str | Path]) -> list[LoraAdapter]:
    """The adapters in ``folders`` by name. Raises AdapterError as `LoraAdapter.read` does."""
    return [LoraAdapter.read(name, Path(folder)) for name, folder in folders.items()]


def _content(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise AdapterError(
            f"adapter {name} has no readable {file} ({error.strerror}); name a folder in which PEFT's save_pretrained wrote "
            f"{CONFIG} and {TENSORS}"
        ) from error


def _check_settings(name: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"adapter {name} is of the kind {config.get('peft_type')!r}, expected LORA")
    beyond = sorted(key for key, value in config.items() if value and key not in _READ | _WITHOUT_EFFECT)
    if config.get("bias", "none") != "none":
        beyond.append("bias")
    begin = config.get("init_lora_weights", True)
    if begin not in _KEEPS_BASE:
        beyond.append(f"init_lora_weights={begin}")
    if beyond:
        raise AdapterError(
            f"adapter {name} sets {', '.join(beyond)}, which cannot be added to a compiled model; merge the adapter into the "
            "model (PEFT's merge_and_unload) and export that"
        )


def _tensors(name: str, content: bytes) -> dict[str, NDArray[np.float32]]:
    import safetensors  # here: engines without adapters do not need it

    try:
        found = safetensors.deserialize(content)
        return {key: _array(tensor) for key, tensor in found}
    except Exception as error:  # safetensors raises a class of its own, without a common base
        raise AdapterError(f"{TENSORS} of adapter {name} cannot be read ({error}); save the adapter again") from error


def _array(tensor: Mapping[str, Any]) -> NDArray[np.float32]:
    data, dtype = tensor["data"], tensor["dtype"]
    if dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype in _FLOATS:
        array = np.frombuffer(data, _FLOATS[dtype]).astype(np.float32)
    else:
        raise ValueError(f"tensors of type {dtype}")
    if not np.isfinite(array).all():
        raise ValueError("it holds NaN or infinite values")
    return array.reshape(tensor["shape"])


def _modules(name: str, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, LowRank]:
    pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
    others = []
    for key, tensor in tensors.items():
        match = _MATRIX.fullmatch(key)
        if match is None or tensor.ndim != 2:
            others.append(key)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    others += [module for module, pair in pairs.items() if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]]
    if others or not pairs:
        raise AdapterError(
            f"adapter {name} holds {_listed(others) or 'no matrices'}, expected pairs MODULE.lora_A.weight [r, K] and "
            "MODULE.lora_B.weight [N, r]; merge it into the model (PEFT's merge_and_unload) and export that"
        )
    return {
        module: LowRank(p["A"], p["B"] * np.float32(_scale(name, config, module, len(p["A"])))) for module, p in pairs.items()
    }


def _scale(name: str, config: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if _matches(key, module)), config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"lora_alpha of adapter {name} is {alpha!r}, expected a number; save the adapter again")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matches(pattern: str, module: str) -> bool:
    """Whether ``pattern`` names ``module``, by the rule of PEFT's ``get_pattern_key``."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _listed(names: Iterable[str], most: int = 5) -> str:
    """``names``, the first ``most`` of them."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
