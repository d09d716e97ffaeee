"""Weights as ONNX Runtime packs them for the CPU, in the bundle once: every session maps them instead of keeping its own copy.

When ONNX Runtime makes a session it lays the constant operand of each fp32 MatMul and Gemm out anew, in memory of its own: two
forms of a segment, or two processes, hold the weights twice. An initializer may say where such a layout lies in its file, in
entries ``prepacked_N`` of its external data: ``OPERATOR+HASH|offset;length;checksum``, as ONNX Runtime writes them itself
(``session.save_external_prepacked_constant_initializers``, onnxruntime/core/framework/tensor_external_data_info.cc).

At load it still packs one weight after the other, and where an entry has the hash of what came out it maps that (since 1.32 after
comparing the two) and drops its own. So a processor or a release that packs in another way finds nothing and computes the same
from its own copies, and a graph keeps our nodes: what is fused is decided where it runs.

Only fp32: of an fp16 weight ONNX Runtime makes an fp32 one when it loads the graph (no kernels), which has no place in a file.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from tide_runtime.errors import OutputError, TargetError

from tide_export.weights import INLINE_BYTES, WeightFile

_ENTRY = "prepacked_"


@dataclass(frozen=True)
class _Reader:
    """One operand of one node that a weight is, the weight being known by where it lies: what decides how it is packed."""

    offset: str
    operator: str
    operand: int
    attributes: bytes


@dataclass(frozen=True)
class _Packed:
    """``key``: operator and hash. ``blobs``: offset and length in the weight file."""

    key: str
    blobs: tuple[tuple[int, int], ...]

    def entry(self) -> str:
        return "|".join([self.key, *(f"{offset};{length};0" for offset, length in self.blobs)])  # 0: a checksum nobody reads


class WeightPacker:
    """Packs the graphs of one target into ``weights``, where the graphs have their weights already.

    Args:
        workspace: a folder for what ONNX Runtime writes: one graph's weights and their packed forms at a time.
    """

    def __init__(self, weights: WeightFile, workspace: Path) -> None:
        self._weights, self._workspace = weights, workspace
        self._packed: dict[_Reader, list[_Packed]] = {}

    def pack(self, file: Path) -> None:
        """Put into the graph in ``file`` where its weights lie packed; pack those that no graph before has used in this way.

        Raises TargetError when ONNX Runtime refuses the graph, OutputError when the disk is full.
        """
        model = onnx.load(file, load_external_data=False)
        readers = _readers(model.graph)
        if any(reader not in self._packed for found in readers.values() for reader in found):
            self._learn(file, readers)
        self._refer(model.graph, readers)
        onnx.save(model, file)

    def _learn(self, file: Path, readers: dict[str, list[_Reader]]) -> None:
        packed: dict[_Reader, list[_Packed]] = {reader: [] for found in readers.values() for reader in found}
        self._weights.flush()
        with tempfile.TemporaryDirectory(dir=self._workspace) as folder:
            for name, key, blobs in _packed_by_onnxruntime(file, Path(folder)):
                stored = tuple((self._weights.store(memoryview(blob)), len(blob)) for blob in blobs)
                for reader in readers.get(name, ()):  # a weight that the optimiser made anew has no place in our file
                    packed[reader].append(_Packed(key, stored))
        for reader, entries in packed.items():
            self._packed.setdefault(reader, entries)

    def _refer(self, graph: onnx.GraphProto, readers: dict[str, list[_Reader]]) -> None:
        given: set[str] = set()  # ONNX Runtime takes a key once a graph: equal weights share it
        for tensor in graph.initializer:
            known = {p.key: p for reader in readers.get(tensor.name, ()) for p in self._packed[reader]}
            for number, key in enumerate(sorted(known.keys() - given)):
                tensor.external_data.add(key=f"{_ENTRY}{number}", value=known[key].entry())
            given |= known.keys()


def _readers(graph: onnx.GraphProto) -> dict[str, list[_Reader]]:
    """Who reads each weight that lies in the weight file, by the weight's name in ``graph``."""
    external = onnx.TensorProto.EXTERNAL
    offsets = {tensor.name: _entries(tensor)["offset"] for tensor in graph.initializer if tensor.data_location == external}
    readers = defaultdict(list)
    for node in graph.node:
        attributes = b"".join(sorted(attribute.SerializeToString() for attribute in node.attribute))
        for operand, name in enumerate(node.input):
            if name in offsets:
                readers[name].append(_Reader(offsets[name], node.op_type, operand, attributes))
    return readers


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _packed_by_onnxruntime(file: Path, folder: Path) -> Iterator[tuple[str, str, list[bytes]]]:
    """Weight, key and blobs of everything that ONNX Runtime packs for the graph in ``file``."""
    saved, data = folder / "graph.onnx", folder / "graph.bin"
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(saved)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", data.name)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(INLINE_BYTES))
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    try:
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises bare classes of its own
        raise TargetError(
            f"ONNX Runtime {ort.__version__} cannot pack the weights of {file.name} ({error}); free disk space of twice the "
            "weights' size, or leave them out with --no-packed-weights"
        ) from error
    for tensor in onnx.load(saved, load_external_data=False).graph.initializer:
        for name, entry in _entries(tensor).items():
            if name.startswith(_ENTRY):
                key, *places = entry.split("|")
                yield tensor.name, key, [_read(data, *map(int, place.split(";")[:2])) for place in places]


def _read(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as data:
        data.seek(offset)
        content = data.read(length)
    if len(content) != length:
        raise OutputError(f"{file} was cut short: the disk is full; free some space or choose another --out")
    return content
