"""The layouts in which GPTQ, AWQ, compressed-tensors and bitsandbytes store a quantised matrix, and what reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, UnsupportedModelError

from tide_export.weights.quantized_weight import QuantizedWeight

# Field i of a packed AWQ word holds output feature AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NO_KERNEL_FOR_CODE_BOOKS = "bitsandbytes rounds them to a code book with uneven steps, which the kernels do not take"
ACT_ORDER = "act-order spreads their groups over the input features, and the kernels take blocks of adjacent ones"


@dataclass(frozen=True)
class Dequantized:
    """A matrix fp32 [N, K] that has no form in blocks, and the reason as the end of a sentence."""

    matrix: NDArray[np.float32]
    reason: str


@dataclass(frozen=True)
class StoredModule:
    """The tensors of one quantised module.

    ``shape``: output and input features [N, K] in the model; None if the model has no matrix of this name.
    """

    name: str
    shape: tuple[int, int] | None
    stored: Mapping[str, Any]

    def tensor(
        self, part: str, shape: Iterable[int] | None = None, dtypes: tuple[torch.dtype, ...] | None = None
    ) -> torch.Tensor:
        """Tensor ``part``. Raises ModelFilesError if it is missing or has another shape or type."""
        name = f"{self.name}.{part}"
        if name not in self.stored:
            raise ModelFilesError(f"the checkpoint has no {name}, which its other tensors of {self.name} need; download it again")
        tensor = self.stored[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ModelFilesError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if dtypes and tensor.dtype not in dtypes:
            raise ModelFilesError(f"{name} has type {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
        return tensor

    def matrix(self, part: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Tensor ``part``, of the shape of the module's weight."""
        tensor = self.tensor(part, self.shape, dtypes)
        if tensor.ndim != 2:
            raise ModelFilesError(f"{self.name}.{part} has shape {tuple(tensor.shape)}, expected a matrix")
        return tensor

    def optional(self, part: str, shape: Iterable[int] | None = None) -> torch.Tensor | None:
        return self.tensor(part, shape) if f"{self.name}.{part}" in self.stored else None

    def lacks(self, part: str, why: str) -> UnsupportedModelError:
        """The error for a checkpoint without ``part``, which the settings say the module has: a default would change weights."""
        return UnsupportedModelError(
            f"the checkpoint has no {self.name}.{part}, but {why}; save the model with that tensor, or take the original model"
        )

    def scales(self, part: str, shape: Iterable[int] | None = None) -> NDArray[np.float32]:
        return self.tensor(part, shape, (torch.float16, torch.bfloat16, torch.float32)).float().numpy()

    def groups(self, features: int, group_size: int) -> tuple[int, int]:
        """Size and number of the groups of ``features`` input features; -1: one group of all.

        Raises UnsupportedModelError if the size does not divide the number of features.
        """
        size = features if group_size == -1 else group_size
        if size < 1 or features % size:
            raise UnsupportedModelError(
                f"{self.name} has {features} input features in groups of {group_size}, which do not divide them; "
                "quantise the model with a group size that divides every layer's input"
            )
        return size, features // size

    def in_groups(
        self,
        bits: int,
        values: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zero_points: NDArray[np.uint8] | None,
        g_idx: torch.Tensor | None,
        origin: str,
    ) -> QuantizedWeight | Dequantized:
        """``values`` [N, K] with scales and zero points [N, G]; ``g_idx`` [K] is the group of each input feature."""
        features = values.shape[1]
        groups = scales.shape[1]
        size = features // groups
        group_of = np.arange(features) // size if g_idx is None else g_idx.numpy().astype(np.int64)
        if group_of.shape != (features,) or group_of.min() < 0 or group_of.max() >= groups:
            raise ModelFilesError(
                f"{self.name}'s group index does not give each of {features} input features one of {groups} groups"
            )
        if zero_points is not None and (zero_points == 1 << (bits - 1)).all():
            zero_points = None
        block = _block_size(bits, size)
        if block and (group_of.reshape(-1, block) == group_of[::block, None]).all():
            order = group_of[::block]
            chosen = None if zero_points is None else np.ascontiguousarray(zero_points[:, order])
            return QuantizedWeight(
                bits, np.ascontiguousarray(values), np.ascontiguousarray(scales[:, order]), chosen, origin=origin
            )
        zeros = np.float32(1 << (bits - 1)) if zero_points is None else zero_points[:, group_of].astype(np.float32)
        matrix = (values.astype(np.float32) - zeros) * scales[:, group_of]
        return Dequantized(matrix, ACT_ORDER if block else f"the kernels take no groups of {size} input features")


@dataclass(frozen=True)
class CheckpointFormat:
    """How a checkpoint stores a quantised module: the names of its tensors other than ``weight``, and what reads them."""

    parts: tuple[str, ...]
    read: Callable[[StoredModule], QuantizedWeight | Dequantized]
    notes: tuple[str, ...] = ()


def format_of(settings: dict[str, Any]) -> CheckpointFormat:
    method = settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else None)
    layouts = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "bitsandbytes": _bitsandbytes}
    method = getattr(method, "value", method)
    if method not in layouts:
        raise UnsupportedModelError(
            f"checkpoints quantised with {method!r} are not supported; take one of {', '.join(layouts)}, or the original model"
        )
    return layouts[method](settings)


def _block_size(bits: int, group_size: int) -> int | None:
    """Input features per block, for groups of ``group_size``; None if the kernels take none.

    With blocks of 16 or 32 (8 bits: 64 too) a product has the same bits whatever else is in the launch.
    """
    widest = 32 if bits == 4 else 64
    size = group_size if group_size == widest else math.gcd(group_size, 32)
    return size if size >= 16 else None


def _fields(packed: torch.Tensor, bits: int) -> NDArray[np.uint8]:
    """The unsigned fields of 4 or 8 bits in int32 words, lowest first: [R, C] → [R, C · 32 / bits]."""
    octets = np.ascontiguousarray(packed.numpy().astype("<i4")).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(octets.shape[0], -1)


def _taken_bits(bits: Any, method: str) -> int:
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{method} weights of {bits} bits are not supported: the kernels take 4 and 8 bits")
    return bits


def _gptq(settings: dict[str, Any]) -> CheckpointFormat:
    """int32 words along the input features; AutoGPTQ's format (`gptq`) stores zero points less 1, `gptq_v2` as they are."""
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise UnsupportedModelError(f"the GPTQ layout {layout!r} is not supported; save the model as 'gptq' or 'gptq_v2'")
    _taken_bits(settings.get("bits"), "GPTQ")

    def read(module: StoredModule) -> QuantizedWeight | Dequantized:
        chosen = {**settings, **_dynamic_settings(settings.get("dynamic"), module.name)}
        bits = _taken_bits(chosen["bits"], "GPTQ")
        fields = 32 // bits
        packed = module.tensor("qweight", dtypes=(torch.int32,))
        outputs, inputs = module.shape or (packed.shape[-1], packed.shape[0] * fields)
        if packed.shape != (inputs // fields, outputs) or inputs % fields:
            raise ModelFilesError(
                f"{module.name}.qweight has shape {tuple(packed.shape)}, "
                f"expected {(-(-inputs // fields), outputs)} for {outputs} x {inputs} weights of {bits} bits"
            )
        _, groups = module.groups(inputs, chosen.get("group_size", -1))
        scales = module.scales("scales", (groups, outputs)).T
        g_idx = module.optional("g_idx")
        if chosen.get("desc_act") and g_idx is None and groups > 1:
            raise module.lacks("g_idx", "desc_act is true, so the order of its input features is in that tensor")
        zeros = _fields(module.tensor("qzeros", (groups, -(-outputs // fields)), (torch.int32,)), bits)[:, :outputs].T
        if layout == "gptq":
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
        return module.in_groups(bits, _fields(packed.T, bits), scales, zeros, g_idx, "GPTQ")

    return CheckpointFormat(("qweight", "qzeros", "scales", "g_idx"), read)


def _dynamic_settings(rules: Mapping[str, Any] | None, module: str) -> Mapping[str, Any]:
    """GPTQModel's settings for single modules: the first regular expression that matches; ``-:`` excludes modules."""
    for pattern, chosen in (rules or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return chosen
    return {}


def _awq(settings: dict[str, Any]) -> CheckpointFormat:
    """AutoAWQ's GEMM layout: int32 words along the output features, in the order of AWQ_ORDER."""
    version = str(settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm").lower()
    backend = settings.get("backend")
    if version != "gemm" or backend == "llm-awq":
        raise UnsupportedModelError(
            f"the AWQ layout {backend if version == 'gemm' else version!r} is not supported, because it interleaves weights "
            "for one kernel; save the model as version 'gemm'"
        )
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedModelError(f"AWQ weights of {bits} bits are not supported: its GEMM layout has 4 bits")
    group_size = settings.get("group_size", settings.get("q_group_size", 128))

    def read(module: StoredModule) -> QuantizedWeight | Dequantized:
        packed = module.tensor("qweight", dtypes=(torch.int32,))
        outputs, inputs = module.shape or (packed.shape[-1] * 8, packed.shape[0])
        if packed.shape != (inputs, outputs // 8) or outputs % 8:
            raise ModelFilesError(
                f"{module.name}.qweight has shape {tuple(packed.shape)}, expected {(inputs, -(-outputs // 8))} "
                f"for {outputs} x {inputs} weights of 4 bits"
            )
        _, groups = module.groups(inputs, group_size)
        scales = module.scales("scales", (groups, outputs)).T
        zeros = module.tensor("qzeros", (groups, outputs // 8), (torch.int32,))
        return module.in_groups(4, _awq_fields(packed).T, scales, _awq_fields(zeros).T, None, "AWQ")

    return CheckpointFormat(("qweight", "qzeros", "scales"), read)


def _awq_fields(packed: torch.Tensor) -> NDArray[np.uint8]:
    """AWQ's words along the output features [M, N / 8] → [M, N]."""
    fields = _fields(packed, 4)
    return fields.reshape(len(fields), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(fields.shape)


def _compressed_tensors(settings: dict[str, Any]) -> CheckpointFormat:
    """`pack-quantized`: int32 words along the input features, values plus 2^(bits - 1); `int-quantized`: int8 as they are."""
    schemes = [scheme for scheme in (settings.get("config_groups") or {}).values() if scheme.get("weights")]
    formats = {scheme.get("format") or settings.get("format") for scheme in schemes} or {settings.get("format")}
    refused = [str(name) for name in formats if name not in ("pack-quantized", "int-quantized")]
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        refused.append(sparsity)
    if (settings.get("transform_config") or {}).get("config_groups"):
        refused.append("transforms of the activations")
    if refused:
        raise UnsupportedModelError(
            f"compressed-tensors with {', '.join(refused)} is not supported; "
            "TIDE takes pack-quantized (4 or 8 bits) and int-quantized (8 bits) weights"
        )
    weights = [scheme["weights"] for scheme in schemes]
    for scheme in weights:
        if scheme.get("type", "int") != "int" or scheme.get("strategy") not in (None, "group", "channel", "tensor"):
            raise UnsupportedModelError(
                f"compressed-tensors weights of type {scheme.get('type')} and strategy {scheme.get('strategy')} are not "
                "supported; TIDE takes integers with a scale per group, channel or tensor"
            )
    bits = {_taken_bits(scheme.get("num_bits", 8), "compressed-tensors") for scheme in weights}
    sizes = {scheme.get("group_size") or -1 for scheme in weights}

    def read(module: StoredModule) -> QuantizedWeight | Dequantized:
        _check_complete(module, schemes)
        if any(f"{module.name}.{part}" in module.stored for part in ("weight_packed", "weight_shape")):
            return _read_pack_quantized(module, bits, sizes)
        return _read_int_quantized(module, sizes)

    notes = []
    if any(scheme.get("input_activations") for scheme in schemes) or settings.get("kv_cache_scheme"):
        notes.append("The checkpoint was made for quantised activations; only its weights are quantised here.")
    return CheckpointFormat(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"), read, tuple(notes)
    )


def _check_complete(module: StoredModule, schemes: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnsupportedModelError for a missing tensor that every scheme that may be the module's has.

    Old releases of compressed-tensors left out zero points that are all 0, which an asymmetric matrix hardly has: refused too.
    """
    found = [scheme["weights"] for scheme in _schemes_of(module.name, schemes)]
    if not found:
        return
    if module.optional("weight_zero_point") is None and all(weights.get("symmetric") is False for weights in found):
        raise module.lacks("weight_zero_point", "symmetric is false, so its zero points are in that tensor")
    if module.optional("weight_g_idx") is None and all(weights.get("actorder") in ("group", True) for weights in found):
        raise module.lacks("weight_g_idx", "actorder is group, so the order of its input features is in that tensor")


def _schemes_of(module: str, schemes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The schemes whose targets name ``module``; without one, those that name classes of modules, as ``Linear``."""

    def names(target: str) -> bool:
        return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module

    named = [scheme for scheme in schemes if any(map(names, scheme.get("targets") or ()))]
    return named or [scheme for scheme in schemes if any(re.fullmatch(r"\w+", target) for target in scheme.get("targets") or ())]


def _read_pack_quantized(module: StoredModule, taken: set[int], sizes: set[int]) -> QuantizedWeight | Dequantized:
    packed = module.tensor("weight_packed", dtypes=(torch.int32,))
    if module.shape is not None and module.optional("weight_shape") is None:
        outputs, inputs = module.shape
    else:
        outputs, inputs = (int(n) for n in module.tensor("weight_shape", (2,)))
    if module.shape not in (None, (outputs, inputs)):
        raise ModelFilesError(f"{module.name}.weight_shape is {(outputs, inputs)}, expected {module.shape}")
    bits = next((b for b in taken if packed.shape == (outputs, -(-inputs * b // 32))), None)
    if bits is None:
        expected = " or ".join(str((outputs, -(-inputs * b // 32))) for b in sorted(taken))
        raise ModelFilesError(f"{module.name}.weight_packed has shape {tuple(packed.shape)}, expected {expected}")
    scales = _channel_or_group_scales(module, outputs, inputs, sizes)
    zeros = module.optional("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = module.tensor("weight_zero_point", (-(-outputs * bits // 32), scales.shape[1]))
        zero_points = _fields(zeros.T, bits)[:, :outputs].T
    else:
        zero_points = _signed_zero_points(module, bits, scales.shape)
    values = _fields(packed, bits)[:, :inputs]
    return module.in_groups(bits, values, scales, zero_points, module.optional("weight_g_idx"), "compressed-tensors")


def _read_int_quantized(module: StoredModule, sizes: set[int]) -> QuantizedWeight | Dequantized:
    weight = module.matrix("weight", (torch.int8,))
    scales = _channel_or_group_scales(module, weight.shape[0], weight.shape[1], sizes)
    zero_points = _signed_zero_points(module, 8, scales.shape)
    values = weight.numpy().view(np.uint8) ^ np.uint8(128)
    return module.in_groups(8, values, scales, zero_points, module.optional("weight_g_idx"), "compressed-tensors")


def _channel_or_group_scales(module: StoredModule, outputs: int, inputs: int, sizes: set[int]) -> NDArray[np.float32]:
    """fp32 [N, G] of a scale per group, channel (G = 1) or tensor (repeated for each channel); size -1: channel or tensor."""
    scales = module.scales("weight_scale")
    if scales.size == 1 and -1 in sizes:
        return np.full((outputs, 1), scales.item(), np.float32)
    dividing = [size for size in sizes if size == -1 or inputs % size == 0]
    if not dividing:
        module.groups(inputs, max(sizes))
    expected = sorted({(outputs, module.groups(inputs, size)[1]) for size in dividing})
    if scales.shape not in expected:
        raise ModelFilesError(f"{module.name}.weight_scale has shape {scales.shape}, expected {' or '.join(map(str, expected))}")
    return scales


def _signed_zero_points(module: StoredModule, bits: int, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """Zero points of signed integers, made unsigned; None if there are none."""
    zeros = module.optional("weight_zero_point")
    if zeros is None:
        return None
    signed = zeros.numpy().astype(np.int64) + (1 << (bits - 1))
    if zeros.numel() == 1:
        signed = np.broadcast_to(signed.reshape(1, 1), shape)
    if signed.shape != shape or signed.min() < 0 or signed.max() >= 1 << bits:
        raise ModelFilesError(f"{module.name}.weight_zero_point is no {shape} matrix of signed integers of {bits} bits")
    return signed.astype(np.uint8)


def _bitsandbytes(settings: dict[str, Any]) -> CheckpointFormat:
    """4 bits: indices into a code book of 16 values, times a maximum per block; 8 bits: int8 with a scale per channel."""
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        state = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
        parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *state)
        return CheckpointFormat(tuple(f"weight.{part}" for part in parts), _read_code_book)
    return CheckpointFormat(("SCB", "weight_format"), _read_llm_int8)


def _read_code_book(module: StoredModule) -> Dequantized:
    kind = "fp4" if f"{module.name}.weight.quant_state.bitsandbytes__fp4" in module.stored else "nf4"
    state_name = f"weight.quant_state.bitsandbytes__{kind}"
    try:
        state = json.loads(bytes(module.tensor(state_name, dtypes=(torch.uint8,)).numpy()))
        (outputs, inputs), block_size = state["shape"], state["blocksize"]
        blocks = -(-outputs * inputs // block_size)
        nested_size = state.get("nested_blocksize")
        offset = np.float32(state.get("nested_offset", 0))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelFilesError(f"{module.name}.{state_name} does not hold the shape and block size of a matrix") from error
    if module.shape not in (None, (outputs, inputs)):
        raise ModelFilesError(f"{module.name}.weight has shape {(outputs, inputs)}, expected {module.shape}")
    if nested_size:  # the maxima are quantised too, with a code book of 256 values
        absmax = module.tensor("weight.absmax", (blocks,), (torch.uint8,)).numpy()
        nested = module.scales("weight.nested_absmax", (-(-blocks // nested_size),))
        code = module.scales("weight.nested_quant_map", (256,))[absmax]
        maxima = code * np.repeat(nested, nested_size)[:blocks] + offset
    else:
        maxima = module.scales("weight.absmax", (blocks,))
    octets = module.tensor("weight").contiguous().view(torch.uint8).numpy().reshape(-1)
    if octets.size != -(-outputs * inputs // 2):
        raise ModelFilesError(f"{module.name}.weight has {octets.size} bytes, expected {-(-outputs * inputs // 2)}")
    indices = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)[: outputs * inputs]
    values = module.scales("weight.quant_map", (16,))[indices] * np.repeat(maxima, block_size)[: outputs * inputs]
    return Dequantized(values.reshape(outputs, inputs), NO_KERNEL_FOR_CODE_BOOKS)


def _read_llm_int8(module: StoredModule) -> QuantizedWeight | Dequantized:
    weight = module.matrix("weight", (torch.int8,))
    layout = module.optional("weight_format")
    if layout is not None and layout.item() != 0:
        raise UnsupportedModelError(
            f"{module.name} is stored in a GPU's tile order, which bitsandbytes no longer writes; "
            "save the model with a newer release"
        )
    scales = module.scales("SCB", weight.shape[:1])[:, None] / np.float32(127)
    return module.in_groups(8, weight.numpy().view(np.uint8) ^ np.uint8(128), scales, None, None, "bitsandbytes int8")
