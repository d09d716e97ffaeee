"""Bundles that travel to a machine without a registry: graphs and manifest as they are, and of the weights what makes them up.

A block of the weights' file is *stored* in a compressed file; as *halves*, where its fp32 numbers are bf16 ones; as a *cast* of a
block of another carried bundle; or it is *random*, for models that only their speed is measured of.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto

WEIGHTS = Path("onnx") / "weights.bin"
_LIST, _STORED = "weights.json", "weights.xz"
_TORCH: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.UINT8: torch.uint8,
}
_RANDOM_BYTES = 2**17  # of the smallest random block: norms and rotary tables keep their values
_STD = 0.02
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    """``kind``: stored, halves, cast or random. ``scale``: of low-bit weights' scales, 0 for other numbers. ``source``: of a
    cast, the offset in the other bundle's file."""

    offset: int
    size: int
    dtype: int
    kind: str
    scale: float = 0.0
    source: int = -1


def pack(bundle: Path, to: Path, is_random: bool = False, base: Path | None = None) -> int:
    """Write the carried form of ``bundle`` to the folder ``to``; returns its bytes.

    Args:
        is_random: the values of large blocks are left out.
        base: a bundle in fp32 whose carried form will be beside ``to``; casts refer to it.
    """
    shutil.copytree(bundle, to, ignore=shutil.ignore_patterns(WEIGHTS.name))
    content = np.memmap(bundle / WEIGHTS, np.uint8, "r")
    casts = _fp16_digests(base) if base is not None else {}
    blocks, stored = list[Block](), list[bytes]()
    for block in _blocks(bundle):
        data = content[block.offset : block.offset + block.size]
        if is_random and block.size >= _RANDOM_BYTES:
            kind, source, kept = "random", -1, b""
        elif (place := casts.get(hashlib.sha256(data.tobytes()).digest())) is not None:
            kind, source, kept = "cast", place, b""
        elif block.dtype == TensorProto.FLOAT and not data.reshape(-1, 4)[:, :2].any():
            kind, source, kept = "halves", -1, data.reshape(-1, 4)[:, 2:].T.tobytes()  # by planes, which compress better
        else:
            kind, source, kept = "stored", -1, data.tobytes()
        blocks.append(Block(block.offset, block.size, block.dtype, kind, block.scale, source))
        stored.append(kept)
    (to / _STORED).write_bytes(lzma.compress(b"".join(stored)))
    name = base.name if base is not None else None
    (to / _LIST).write_text(json.dumps({"base": name, "bytes": len(content), "blocks": [asdict(block) for block in blocks]}))
    return sum(path.stat().st_size for path in to.rglob("*") if path.is_file())


def unpack(carried: Path, to: Path, device: str) -> Path:
    """The bundle of ``carried`` in the folder ``to``, made unless it is there. ``device``: torch's, which draws random blocks."""
    if (to / WEIGHTS).exists():
        return to
    given = json.loads((carried / _LIST).read_text())
    base: NDArray[Any] | None = None
    if given["base"] is not None:
        base = np.memmap(unpack(carried.parent / given["base"], to.parent / given["base"], device) / WEIGHTS, np.uint8, "r")
    shutil.copytree(carried, to, ignore=shutil.ignore_patterns(_LIST, _STORED), dirs_exist_ok=True)
    stored, place = np.frombuffer(lzma.decompress((carried / _STORED).read_bytes()), np.uint8), 0
    generator = torch.Generator(device).manual_seed(0)
    partial = to / WEIGHTS.with_suffix(".partial")
    with partial.open("wb") as file:
        for block in (Block(**entry) for entry in given["blocks"]):
            file.seek(block.offset)
            count = {"stored": block.size, "halves": block.size // 2}.get(block.kind, 0)
            _content(block, stored[place : place + count], base, generator).tofile(file)
            place += count
        file.truncate(given["bytes"])
    partial.rename(to / WEIGHTS)  # last: what was cut off is made again
    return to


def _content(block: Block, kept: Bytes, base: Bytes | None, generator: torch.Generator) -> Bytes:
    if block.kind == "random":
        return _random(block, generator).cpu().view(torch.uint8).numpy()
    if block.kind == "halves":
        whole = np.zeros((block.size // 4, 4), np.uint8)
        whole[:, 2:] = kept.reshape(2, -1).T
        return whole.reshape(-1)
    if block.kind == "cast":
        assert base is not None
        return base[block.source : block.source + 2 * block.size].view(np.float32).astype(np.float16).view(np.uint8)
    return kept


def _random(block: Block, generator: torch.Generator) -> torch.Tensor:
    dtype, device = _TORCH[block.dtype], generator.device
    count = block.size // dtype.itemsize
    if dtype is torch.uint8:
        return torch.randint(0, 256, (count,), dtype=dtype, device=device, generator=generator)
    if block.scale:
        return (torch.rand(count, device=device, generator=generator) + 0.5).mul_(block.scale).to(dtype)
    return torch.randn(count, device=device, generator=generator).mul_(_STD).to(dtype)


def _fp16_digests(base: Path) -> dict[bytes, int]:
    """SHA-256 of a block of ``base`` in fp16 → its offset in fp32."""
    content = np.memmap(base / WEIGHTS, np.uint8, "r")
    found = {}
    for block in _blocks(base):
        if block.dtype == TensorProto.FLOAT:
            data = content[block.offset : block.offset + block.size].view(np.float32).astype(np.float16)
            found[hashlib.sha256(data.tobytes()).digest()] = block.offset
    return found


def _blocks(bundle: Path) -> Iterator[Block]:
    """The blocks of the weights' file that the graphs refer to, by offset."""
    found: dict[int, Block] = {}
    for path in sorted((bundle / WEIGHTS.parent).glob("*.onnx")):
        graph = onnx.load(path, load_external_data=False).graph
        scales = {name: bits for node in graph.node for name, bits in _scales(node)}
        for tensor in graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                place = {entry.key: entry.value for entry in tensor.external_data}
                scale = 3 * _STD / 2 ** (scales[tensor.name] - 1) if tensor.name in scales else 0.0
                offset = int(place["offset"])
                found[offset] = Block(offset, int(place["length"]), tensor.data_type, "stored", scale)
    yield from (found[offset] for offset in sorted(found))


def _scales(node: Any) -> Iterator[tuple[str, int]]:
    """The scales that an operator on low-bit weights reads, and the weights' bits."""
    if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
        bits = next((attribute.i for attribute in node.attribute if attribute.name == "bits"), 4)
        yield node.input[2], bits
