"""ONNX graphs as lists of nodes, and their weights as tensors on a device, which all graphs of a bundle share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto

from tide_runtime.errors import BundleError

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool,
}
_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class Weight:
    """A constant of a graph: ``data`` are its bytes, in the file of weights or in the graph. ``key``: equal for equal bytes."""

    key: Hashable
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def on_host(self) -> torch.Tensor:
        """The constant without a copy."""
        if not self.data.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class GraphNode:
    """One operator; ``inputs`` that are left out are empty. ``op``: its type, with the domain where that is not ONNX's own."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class GraphFile:
    """``inputs`` and ``outputs``: name → shape, with names of dynamic dimensions; ``types``: name → dtype."""

    nodes: Sequence[GraphNode]
    inputs: dict[str, list[int | str | None]]
    outputs: dict[str, list[int | str | None]]
    types: dict[str, torch.dtype]
    weights: dict[str, Weight]


def read_graph(path: Path) -> GraphFile:
    """The graph in the ONNX file ``path``, whose weights are mapped. Raises BundleError when it is no such file."""
    try:
        graph = onnx.load_model(path, load_external_data=False).graph
        weights = {tensor.name: _weight(tensor, path.parent) for tensor in graph.initializer}
        types = {value.name: DTYPES[value.type.tensor_type.elem_type] for value in (*graph.input, *graph.output)}
    except (OSError, ValueError, KeyError, DecodeError) as error:
        raise BundleError(f"{path.name} cannot be read ({type(error).__name__}: {error}); export the bundle again") from error
    nodes = [
        GraphNode(
            node.op_type if node.domain in _STANDARD else f"{node.domain}::{node.op_type}",
            node.name,
            tuple(node.input),
            tuple(node.output),
            {attribute.name: _attribute(attribute) for attribute in node.attribute},
        )
        for node in graph.node
    ]
    return GraphFile(nodes, _shapes(graph.input), _shapes(graph.output), types, weights)


def _attribute(attribute: Any) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _shapes(values: Sequence[Any]) -> dict[str, list[int | str | None]]:
    return {value.name: [_dim(dim) for dim in value.type.tensor_type.shape.dim] for value in values}


def _dim(dim: Any) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


def _weight(tensor: Any, folder: Path) -> Weight:
    """Raises ValueError for an element type that no graph has."""
    if tensor.data_type not in DTYPES:
        raise ValueError(f"{tensor.name} has elements of type {TensorProto.DataType.Name(tensor.data_type)}")
    dtype = DTYPES[tensor.data_type]
    shape = tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place.get("offset", 0)), int(place["length"])
        # Copy on write, because torch has no tensors that are read-only.
        data = np.memmap(folder / place["location"], np.uint8, "c", offset, length)
        return Weight((place["location"], offset, dtype, shape), dtype, shape, data)
    raw = tensor.raw_data or np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).tobytes()
    return Weight((raw, dtype, shape), dtype, shape, np.frombuffer(bytearray(raw), np.uint8))


class DeviceWeights:
    """Constants on ``device``, each made once for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors = dict[Hashable, torch.Tensor]()

    def get(self, weight: Weight) -> torch.Tensor:
        return self.derived((), [weight], lambda tensors: tensors[0])

    def derived(
        self, how: Hashable, weights: Sequence[Weight], make: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """``make`` of ``weights`` on the device, in the way that ``how`` names; made once."""
        key = (how, *(weight.key for weight in weights))
        if key not in self._tensors:
            self._tensors[key] = make([weight.on_host().to(self.device) for weight in weights])
        return self._tensors[key]
