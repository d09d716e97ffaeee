"""Write weights in ONNX Runtime's packed CPU layout into the bundle once; every session then maps them instead of a copy.

At session creation ONNX Runtime repacks the constant operand of each fp32 MatMul and Gemm into private memory: two forms of a
segment, or two processes, hold the weights twice. An initializer may locate a packed layout in its file, in entries
``prepacked_N`` of its external data: ``OPERATOR+HASH|offset;length;checksum``, as ONNX Runtime writes them
(``session.save_external_prepacked_constant_initializers``, onnxruntime/core/framework/tensor_external_data_info.cc).

At load ONNX Runtime still packs each weight. If an entry has the hash of the result, it maps the entry (since 1.32 after
comparing both) and frees its own copy. A processor or release with another layout matches no entry and computes the same from its
own copies. The graph keeps its nodes: ONNX Runtime fuses them on the machine that runs it.

Only fp32: ONNX Runtime has no fp16 kernels on the CPU and casts fp16 weights to fp32 at load, where no file location exists.
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
class _Use:
    """A weight, identified by its offset in the weight file, as one operand of one node; determines the packed layout."""

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
        return "|".join([self.key, *(f"{offset};{length};0" for offset, length in self.blobs)])  # 0: an unused checksum


class WeightPacker:
    """Packs the weights of one target's graphs into ``weights``, the file that holds them unpacked.

    Args:
        workspace: folder for ONNX Runtime's files: the weights and packed layouts of one graph at a time.
    """

    def __init__(self, weights: WeightFile, workspace: Path) -> None:
        self._weights, self._workspace = weights, workspace
        self._packed: dict[_Use, list[_Packed]] = {}

    def pack(self, file: Path) -> None:
        """Add the locations of packed weights to the graph in ``file``; pack weights that no earlier graph used the same way.

        Raises TargetError if ONNX Runtime rejects the graph, OutputError if the disk is full.
        """
        model = onnx.load(file, load_external_data=False)
        uses = _weight_uses(model.graph)
        if any(use not in self._packed for found in uses.values() for use in found):
            self._pack_weights(file, uses)
        self._add_entries(model.graph, uses)
        onnx.save(model, file)

    def _pack_weights(self, file: Path, uses: dict[str, list[_Use]]) -> None:
        packed: dict[_Use, list[_Packed]] = {use: [] for found in uses.values() for use in found}
        self._weights.flush()
        with tempfile.TemporaryDirectory(dir=self._workspace) as folder:
            for name, key, blobs in _packed_by_onnxruntime(file, Path(folder)):
                stored = tuple((self._weights.store(memoryview(blob)), len(blob)) for blob in blobs)
                for use in uses.get(name, ()):  # none for a weight that the optimiser created: it is not in our file
                    packed[use].append(_Packed(key, stored))
        for use, entries in packed.items():
            self._packed.setdefault(use, entries)

    def _add_entries(self, graph: onnx.GraphProto, uses: dict[str, list[_Use]]) -> None:
        given: set[str] = set()  # ONNX Runtime accepts a key once per graph: equal weights share it
        for tensor in graph.initializer:
            known = {p.key: p for use in uses.get(tensor.name, ()) for p in self._packed[use]}
            for number, key in enumerate(sorted(known.keys() - given)):
                tensor.external_data.add(key=f"{_ENTRY}{number}", value=known[key].entry())
            given |= known.keys()


def _weight_uses(graph: onnx.GraphProto) -> dict[str, list[_Use]]:
    """Name in ``graph`` → uses of each weight that is stored in the weight file."""
    external = onnx.TensorProto.EXTERNAL
    offsets = {tensor.name: _entries(tensor)["offset"] for tensor in graph.initializer if tensor.data_location == external}
    uses = defaultdict(list)
    for node in graph.node:
        attributes = b"".join(sorted(attribute.SerializeToString() for attribute in node.attribute))
        for operand, name in enumerate(node.input):
            if name in offsets:
                uses[name].append(_Use(offsets[name], node.op_type, operand, attributes))
    return uses


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _packed_by_onnxruntime(file: Path, folder: Path) -> Iterator[tuple[str, str, list[bytes]]]:
    """Weight, key and blobs of each weight that ONNX Runtime packs for the graph in ``file``."""
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
                yield tensor.name, key, [read_range(data, *map(int, place.split(";")[:2])) for place in places]


def read_range(file: Path, offset: int, length: int) -> bytes:
    """``length`` bytes of ``file`` at ``offset``. Raises OutputError if the file is shorter."""
    with file.open("rb") as data:
        data.seek(offset)
        content = data.read(length)
    if len(content) != length:
        raise OutputError(f"{file} was cut short: the disk is full; free some space or choose another --out")
    return content
