"""Read a GGUF file: its keys, and its tensors as maps of the file, so that reading takes no memory and a fraction of a second.

A key is taken by what applies it, or has no effect on the model, or ends the export with its name.

Format and keys: docs/gguf.md of https://github.com/ggml-org/ggml, and `LLM_KV_NAMES` in llama.cpp's src/llama-arch.cpp. What
llama.cpp refuses (`gguf_init_from_file_impl` in ggml/src/gguf.cpp) is refused here. The reader of the package gguf makes several
arrays for each token of the vocabulary and takes a minute. Blocks: ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, UnsupportedModelError

from tide_export.weights.quantized_weight import QuantizedWeight, by_rows

Bytes = NDArray[np.uint8]

REQUIRED = object()
PLAIN = ("F32", "F16", "BF16")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # bytes, where no key general.alignment says another
# GGUF's types of values, by number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMPY = {"F32": np.float32, "F16": np.float16}


# Keys without effect on logits, and why.
_NO_EFFECT = {
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|license|url|doi|uuid"
    r"|repo_url|tags|languages|parameter_count)": "describe the model",
    r"general\.(license|source|base_model|dataset)\..*": "describe the model and where it comes from",
    r"general\.(file_type|alignment)": "how the file is laid out: the reader follows the tensors' own types and offsets",
    r"general\.sampling\..*": "advice on sampling: `generation_config` takes what a bundle can hold",
    r"(quantize|imatrix|mradermacher)\..*": "how the file was quantised",
    r"split\.(no|count|tensors\.count)": "a part of a file is refused before",
    r"tokenizer\.ggml\.(model|pre|tokens|token_type|token_type_count|scores|merges|added_tokens|precompiled_charsmap"
    r"|remove_extra_whitespaces|add_(bos|eos|sep)_token|add_space_prefix"
    r"|(bos|eos|eot|eom|unknown|seperator|separator|padding|mask|cls|prefix|suffix|middle|fim_(pre|suf|mid|pad|rep|sep))_token_id"
    r"|suppress_tokens|normalizer\.(lowercase|strip_accents))": "the tokenizer's, or `generation_config` takes them",
    r"tokenizer\.(huggingface\.json|rwkv\.world|chat_templates?(\..*)?)": "the tokenizer's",
    r"\w+\.rope\.scaling\.finetuned": "says that the weights were trained with the scaling",
    r"[\w-]+\.rope\.scaling\.original_context_length": "YaRN takes it; other scalings have none",
}  # fmt: skip
# Keys whose effect is nil at some values; others change the model in a way that it has no place for.
_NIL_AT_0 = (
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale", "attention.sliding_window", "attn_logit_softcapping",
    "final_logit_softcapping", "router_logit_softcapping", "expert_count", "expert_used_count", "expert_shared_count",
    "leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers", "attention.shared_kv_layers", "pooling_type",
    "rope.scaling.alpha", "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
_NIL_AT_0_AND_1 = (
    "attention.output_scale", "logit_scale", "residual_scale", "embedding_scale", "expert_group_count", "expert_group_used_count",
    "expert_weights_scale",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NIL_AT_0, (0,)),
    **dict.fromkeys(_NIL_AT_0_AND_1, (0, 1)),
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),  # rows of query and key as the architecture llama has them
    # llama.cpp drops other values of these in most architectures, so what they mean for a file is open.
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
}


class Metadata:
    """``values``: every key of the file. A key that is taken counts as applied."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self._values = file, values
        self._read_keys: set[str] = {"general.architecture"}
        self.architecture = str(values.get("general.architecture") or "")
        if not self.architecture:
            raise ModelFilesError(f"{file} names no architecture (general.architecture); convert the model again")

    def full(self, key: str) -> Any:
        """The value of a whole name, such as tokenizer.ggml.tokens; None if there is none. Does not count as taken."""
        return self._values.get(key)

    def starting_with(self, *prefixes: str) -> dict[str, Any]:
        """The values of all keys with one of ``prefixes``, by whole name. Does not count as taken."""
        return {name: value for name, value in self._values.items() if name.startswith(prefixes)}

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of the architecture's ``key``, such as block_count. Raises ModelFilesError if a required one is missing."""
        name = f"{self.architecture}.{key}"
        self._read_keys.add(name)
        if name in self._values:
            return self._values[name]
        if default is REQUIRED:
            raise ModelFilesError(f"{self.file} has no key {name}, and nothing else gives it; convert the model again")
        return default

    def take_number(self, key: str, default: Any = REQUIRED, zeros: bool = False) -> Any:
        """`take` of a number, or of a list that has the same number for each layer. ``zeros``: or none for some layers."""
        value = self.take(key, default)
        if not isinstance(value, list):
            return value
        found = set(value) - {0} if zeros else set(value)
        if len(found) > 1 or not value:
            raise self.refused(key, "differs between the layers, and the model's config has one number")
        return found.pop() if found else 0

    def take_each(self, key: str, count: int, default: Any = REQUIRED) -> list[Any]:
        """`take` of a list with a value for each of ``count`` layers; one value is that of each."""
        value = self.take(key, default)
        each = value if isinstance(value, list) else [value] * count
        if len(each) != count:
            raise self.refused(key, f"does not have one value for each of {count} layers")
        return each

    def take_all(self, prefix: str) -> None:
        """Count all keys of the architecture that begin with ``prefix`` as taken: the model has nothing that they act on."""
        self._read_keys |= {name for name in self._values if name.startswith(f"{self.architecture}.{prefix}")}

    def refused(self, key: str, why: str) -> UnsupportedModelError:
        name = key if key in self._values else f"{self.architecture}.{key}"
        value = str(self._values.get(name))
        shown = value if len(value) <= 80 else f"{value[:80]}…"
        return UnsupportedModelError(
            f"{self.file} has {name} = {shown}, and this {why}: the bundle would be another model; "
            "export the HuggingFace checkpoint that the file was made from"
        )

    def check_all_taken(self) -> None:
        """Raise UnsupportedModelError for a key that was not applied and may have an effect."""
        for name, value in self._values.items():
            own = name.removeprefix(f"{self.architecture}.")
            neutral: Collection[Any] = _NEUTRAL.get(own, ())
            if name in self._read_keys or value in neutral or any(re.fullmatch(pattern, name) for pattern in _NO_EFFECT):
                continue
            why = f"is only without effect at {' or '.join(map(str, neutral))}" if neutral else "is a key that nothing applies"
            raise self.refused(name, why)


class _DamagedError(ValueError):
    """What is wrong with the file."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Args:
        kind: GGUF's type, such as Q4_K.
        data: read-only map of the file: numbers of the tensor's shape for F32 and F16, else bytes [N, bytes of a row], or of
            several experts [E, N, bytes of a row].
    """

    name: str
    kind: str
    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised tensor, output features first."""
        if self.kind in _NUMPY:
            return tuple(self.data.shape)
        block, size = _block(self.kind)
        return (*self.data.shape[:-1], self.data.shape[-1] // size * block)

    def dequantized(self, rows: NDArray[np.integer] | slice = slice(None)) -> NDArray[np.float32]:
        """The numbers of ``rows``, those along the first dimension."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        data = self.data[rows]
        if data.ndim == 1:
            return gguf.dequantize(data, kind)
        values = np.empty((len(data), *self.shape[1:]), np.float32)

        def decode(part: slice) -> None:
            values[part] = gguf.dequantize(data[part], kind)

        by_rows(len(data), decode)
        return values


def is_gguf(source: str) -> bool:
    """Whether ``source`` names a GGUF file, by its suffix or its first bytes."""
    path = Path(source)
    return source.endswith(".gguf") or (path.is_file() and _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_file(path: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    """All keys, and all tensors by GGUF name.

    Raises ModelFilesError when the file is missing, no GGUF file, cut short, damaged, or one part of several.
    """
    if not path.is_file():
        raise ModelFilesError(f"there is no file {path}; give a .gguf file, a model directory, or a hub id such as org/name")
    if not _begins_as_gguf(path):
        raise ModelFilesError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}; download it again")
    try:
        keys, tensors = _read(path)
    except (_DamagedError, struct.error, UnicodeDecodeError) as error:
        raise ModelFilesError(
            f"{path} cannot be read ({error}): it was cut short or changed, or is newer than the package "
            "gguf; download it again, or upgrade gguf"
        ) from error
    if isinstance(parts := keys.get("split.count", 0), int) and parts > 1:
        raise ModelFilesError(
            f"{path.name} is part {keys.get('split.no', 0) + 1} of {parts}: join the parts with llama.cpp's "
            f"`llama-gguf-split --merge {path.name} model.gguf`, and export model.gguf"
        )
    return Metadata(path.name, keys), tensors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    with path.open("rb") as file:
        header = _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), len(_MAGIC))
    version = header.number("I")
    if version & 0xFFFF == 0:  # gguf dequantises blocks in this machine's order
        raise ModelFilesError(f"{path.name} has its bytes in the other order; convert it with gguf's `gguf-convert-endian`")
    if version not in _VERSIONS:
        raise _DamagedError(f"its version is {version}, expected {' or '.join(map(str, _VERSIONS))}")
    tensor_count, key_count = header.number("Q"), header.number("Q")
    keys: dict[str, Any] = {}
    for _ in range(key_count):
        name = header.string()
        if name in keys:
            raise _DamagedError(f"it has the key {name} twice")
        keys[name] = header.value(header.number("I"))
    return keys, _tensors(header, tensor_count, keys.get("general.alignment", _ALIGNMENT))


def _tensors(header: _Header, count: int, alignment: Any) -> dict[str, GgufTensor]:
    """Each tensor begins where the one before it ends, rounded up to ``alignment`` bytes."""
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"general.alignment is {alignment!r}, expected a power of two")
    infos = [header.tensor_info() for _ in range(count)]
    start = -(-header.at // alignment) * alignment
    end = 0
    tensors = dict[str, GgufTensor]()
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise _DamagedError(f"it has the tensor {name} twice")
        if offset != end:
            raise _DamagedError(f"the tensor {name} begins at {offset}, expected {end}")
        data = header.map(name, shape, kind, start + offset)
        tensors[name] = GgufTensor(name, kind, data)
        end = -(-(offset + data.nbytes) // alignment) * alignment
    return tensors


def _block(kind: str) -> tuple[int, int]:
    """Values of a block of the type, and its bytes."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


class _Header:
    """Reads ``data`` from the byte ``at`` on; raises struct.error or _DamagedError at its end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data = self.data
        at = self.at
        end = len(self.data)
        length = struct.Struct("<Q")
        found = []
        for _ in range(count):
            (size,) = length.unpack_from(data, at)
            at += length.size + size
            if at > end:
                raise _DamagedError(f"a text of {size} bytes ends behind the end of the file")
            found.append(data[at - size : at].decode())
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        """A number, text, or list of numbers or texts."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _DamagedError(f"a key has a value of the type {kind}, which is not known")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _NUMBERS:
            raise _DamagedError(f"a key has a list of values of the type {kind}, which is not known")
        found = self._array(np.dtype(f"<{_NUMBERS[kind]}"), count, self.at)
        self.at += found.nbytes
        return found.tolist()

    def tensor_info(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape (output features first), type, and offset behind the header."""
        import gguf

        name = self.string()
        count = self.number("I")
        if count > _MAX_DIMENSIONS:
            raise _DamagedError(f"the tensor {name} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        kind = self.number("I")
        if kind not in iter(gguf.GGMLQuantizationType):
            raise _DamagedError(f"the tensor {name} has the type {kind}, which is not a valid GGMLQuantizationType")
        return name, shape, gguf.GGMLQuantizationType(kind).name, self.number("Q")

    def map(self, name: str, shape: tuple[int, ...], kind: str, start: int) -> NDArray[Any]:
        if kind in _NUMPY:
            return self._array(np.dtype(_NUMPY[kind]), math.prod(shape), start).reshape(shape)
        block, size = _block(kind)
        if not shape or shape[-1] % block:
            raise _DamagedError(f"the tensor {name} of shape {shape} has no whole blocks of {kind}")
        rows = (*shape[:-1], shape[-1] // block * size)
        return self._array(np.dtype(np.uint8), math.prod(rows), start).reshape(rows)

    def _array(self, dtype: np.dtype, count: int, start: int) -> NDArray[Any]:
        if start + count * dtype.itemsize > len(self.data):
            raise _DamagedError(f"{count} numbers end behind the end of the file")
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)


def mapped(data: Bytes, kind: str) -> QuantizedWeight | None:
    """A matrix as a `QuantizedWeight`, bit by bit: nothing is quantised again. None for a format that has no such form.

    Formats with a minimum (Q4_1, Q5_1, Q4_K, Q5_K) have a float offset, as their minimum is no multiple of the scale; the zero
    point takes its integer part, so that the offset is at most half a step.

    Args:
        data: [N, bytes of a row], as `GgufTensor` has it.
        kind: name of GGUF's quantisation type, such as Q4_K.
    """
    return _FORMATS[kind](kind, data.reshape(len(data), -1, _block(kind)[1])) if kind in _FORMATS else None


def _small_blocks(kind: str, blocks: Bytes) -> QuantizedWeight:
    """Blocks of 32 [N, blocks, bytes]: fp16 scale, in formats _1 fp16 minimum, in Q5 the values' fifth bits, low bits."""
    minima = _half(blocks[..., 2:4]) if kind.endswith("_1") else None
    packed = blocks[..., 2 if minima is None else 4 :]
    if kind == "Q8_0":
        return _weight(kind, 8, packed ^ 0x80, _half(blocks[..., :2]))  # int8 + 128
    if kind in ("Q4_0", "Q4_1"):
        return _weight(kind, 4, _halves(packed), _half(blocks[..., :2]), minima)
    values = _halves(packed[..., 4:]) | (np.unpackbits(packed[..., :4], axis=-1, bitorder="little") << 4)
    centred = values + 112 if minima is None else values  # Q5_0's zero point is 16, ours 128
    return _weight(kind, 8, centred, _half(blocks[..., :2]), minima)


def _super_blocks(kind: str, blocks: Bytes) -> QuantizedWeight:
    """Q4_K and Q5_K [N, blocks, bytes]: 8 blocks of 32, whose scales and minima are multiples of the super-block's."""
    scales, minima = _k_scales(blocks[..., 4:16])
    low = _halves(blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    if kind == "Q5_K":
        bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [N, blocks, 32, 8]
        low = low | (bits.swapaxes(-1, -2) << 4)
    scales = _half(blocks[..., :2])[..., None] * scales
    return _weight(kind, 4 if kind == "Q4_K" else 8, low, scales, -_half(blocks[..., 2:4])[..., None] * minima)


def _k_scales(packed: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[…, 12] bytes → scales and minima of 6 bits, each […, 8]."""
    low = packed[..., :4]
    high = packed[..., 4:8]
    last = packed[..., 8:]
    scales = np.concatenate([low & 63, (last & 0xF) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([high & 63, (last >> 4) | ((high >> 6) << 4)], -1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q6_k(kind: str, blocks: Bytes) -> QuantizedWeight:
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # [N, blocks, half, 128]
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = low | (pairs.reshape(low.shape) << 4)
    scales = _half(blocks[..., 208:])[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return _weight(kind, 8, values + 96, scales)  # GGUF's zero point is 32, ours 128


def _half(part: Bytes) -> NDArray[np.float32]:
    """[…, 2] bytes → […] fp32."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0].astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """[…, n] bytes → […, 2n]: first all low, then all high halves."""
    return np.concatenate([packed & 0xF, packed >> 4], -1)


def _weight(
    kind: str, bits: int, values: Bytes, scales: NDArray[np.float32], minima: NDArray[np.float32] | None = None
) -> QuantizedWeight:
    """A weight of ``values``, with one scale and minimum for each block; all in any shape that begins with [N]."""
    rows = len(values)
    values = values.reshape(rows, -1)
    scales = scales.reshape(rows, -1)
    if minima is None:
        return QuantizedWeight(bits, values, scales, origin=kind)
    minima = minima.reshape(rows, -1)
    steps = np.divide(-minima, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.clip(np.rint(steps), 0, (1 << bits) - 1).astype(np.uint8)
    return QuantizedWeight(bits, values, scales, zeros, minima + scales * zeros, origin=kind)


_FORMATS: dict[str, Callable[[str, Bytes], QuantizedWeight]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), _small_blocks),
    **dict.fromkeys(("Q4_K", "Q5_K"), _super_blocks),
    "Q6_K": _q6_k,
}
