"""A graph's nodes and where its weights lie, read and changed in an ONNX file: the runtime needs no package onnx.

protobuf, which onnxruntime brings, reads the messages by the part of their schema that is needed here
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3). It keeps fields that the part does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

_SCHEMA = {
    "Model": "int64 ir_version = 1; Graph graph = 7; repeated Opset opset_import = 8",
    "Graph": "repeated Node node = 1; string name = 2; repeated Tensor initializer = 5; repeated Value input = 11; "
    "repeated Value output = 12",
    "Node": "repeated string input = 1; repeated string output = 2; string op_type = 4; repeated Attribute attribute = 5; "
    "string domain = 7",
    "Attribute": "string name = 1; int64 i = 3; int32 type = 20",
    "Tensor": "repeated int64 dims = 1; int32 data_type = 2; string name = 8; bytes raw_data = 9; "
    "repeated Entry external_data = 13; int32 data_location = 14",
    "Entry": "string key = 1; string value = 2",
    "Opset": "int64 version = 2",
    "Value": "string name = 1; Type type = 2",
    "Type": "TensorType tensor_type = 1",
    "TensorType": "int32 elem_type = 1; Shape shape = 2",
    "Shape": "repeated Dimension dim = 1",
    "Dimension": "int64 dim_value = 1; string dim_param = 2",
}
_FLOAT, _EXTERNAL = 1, 1  # TensorProto.DataType.FLOAT, TensorProto.DataLocation.EXTERNAL
_DATA_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "float16": 10}  # values of TensorProto.DataType
_INT_ATTRIBUTE = 2  # AttributeProto.AttributeType.INT


def _schema() -> FileDescriptorProto:
    file = FileDescriptorProto(name="part_of_onnx.proto", package="tide")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for declaration in fields.split(";"):
            *repeated, kind, name, _, number = declaration.split()
            field = described.field.add(name=name, number=int(number))
            field.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            if kind in _SCHEMA:
                field.type_name = f".tide.{kind}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    return file


_pool = DescriptorPool()
_pool.AddSerializedFile(_schema().SerializeToString())
_Model, _Node, _Tensor = (GetMessageClass(_pool.FindMessageTypeByName(f"tide.{name}")) for name in ("Model", "Node", "Tensor"))


def _parsed(model: bytes) -> Any:
    """Raises ValueError if ``model`` is no message."""
    try:
        return _Model.FromString(model)
    except DecodeError as error:
        raise ValueError("cut short or damaged") from error


def external_entries(model: bytes) -> Iterator[tuple[str, str]]:
    """Key and value of every entry of external data: ``location``, ``offset``, …, of one initializer after the other.

    Raises ValueError if ``model`` is no message.
    """
    for tensor in _parsed(model).graph.initializer:
        for entry in tensor.external_data:
            yield entry.key, entry.value


class GraphNode(NamedTuple):
    """A node; names of absent operands are empty."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def graph_nodes(model: bytes) -> Iterator[GraphNode]:
    """The nodes of a graph. Raises ValueError if ``model`` is no message."""
    for node in _parsed(model).graph.node:
        yield GraphNode(node.op_type, tuple(node.input), tuple(node.output))


class ExternalWeight(NamedTuple):
    """An initializer whose data lie in a file: its name in the graph, value in TensorProto.DataType, and place."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    offset: int
    length: int


def external_weights(model: bytes) -> Iterator[ExternalWeight]:
    """The external weights of a graph. Raises ValueError if ``model`` is no message, KeyError if one has no length."""
    for tensor in _parsed(model).graph.initializer:
        if data := {entry.key: entry.value for entry in tensor.external_data}:
            place = int(data.get("offset", 0)), int(data["length"])
            yield ExternalWeight(tensor.name, tensor.data_type, tuple(tensor.dims), *place)


def weight_uses(model: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Operator and operand, and offset and length in the file of weights, of every external weight that a node reads.

    Raises ValueError if ``model`` is no message, KeyError if a weight has no length.
    """
    places = {weight.name: (weight.offset, weight.length) for weight in external_weights(model)}
    for node in graph_nodes(model):
        for operand, name in enumerate(node.inputs):
            if place := places.get(name):
                yield node.operator, operand, *place


def with_location(model: bytes, location: str) -> bytes:
    """The ``model`` with every external weight in the file ``location``, at its old offset.

    Raises ValueError if ``model`` is no message.
    """
    changed = _parsed(model)
    for tensor in changed.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return _bytes(changed)


def with_output(model: bytes, name: str, data: Iterable[tuple[str, str]]) -> bytes:
    """The ``model`` with another initializer ``name``, a float [1], which is also an output; ``data``: its external data."""
    changed = _parsed(model)
    entries = [{"key": key, "value": value} for key, value in data]
    changed.graph.initializer.add(dims=[1], data_type=_FLOAT, name=name, external_data=entries, data_location=_EXTERNAL)
    changed.graph.output.add(name=name, type=_tensor_type(_FLOAT, {"dim_value": 1}))
    return _bytes(changed)


def with_renamed_outputs(model: bytes, names: Mapping[str, str]) -> bytes:
    """The ``model`` whose nodes write ``names[value]`` in the place of a ``value``; readers of the value stay as they are."""
    changed = _parsed(model)
    for node in changed.graph.node:
        node.output[:] = [names.get(value, value) for value in node.output]
    return _bytes(changed)


def with_nodes(model: bytes, nodes: Iterable[Any], arrays: Mapping[str, NDArray[np.generic]], row_input: str) -> bytes:
    """The ``model`` with further ``nodes`` (`node_message`), in any order, initializers, and an int64 input [1, tokens]."""
    changed = _parsed(model)
    changed.graph.node.extend(nodes)
    changed.graph.initializer.extend(_initializers(arrays))
    kind = _tensor_type(_DATA_TYPES["int64"], {"dim_value": 1}, {"dim_param": "tokens"})
    changed.graph.input.add(name=row_input, type=kind)
    return _bytes(changed)


def integer_product(rows: NDArray[np.uint8], matrix: NDArray[np.int8]) -> bytes:
    """A model without inputs, whose output is the int32 product of ``rows`` [T, K] and ``matrix`` [K, N]."""
    model = _Model(ir_version=10, opset_import=[{"version": 20}], graph={"name": "product", "output": [{"name": "product"}]})
    model.graph.node.append(node_message("MatMulInteger", ["rows", "matrix"], "product"))
    model.graph.initializer.extend(_initializers({"rows": rows, "matrix": matrix}))
    return _bytes(model)


def node_message(
    operator: str, inputs: Sequence[str], output: str, domain: str = "", attributes: Mapping[str, int] | None = None
) -> Any:
    """A node with one output."""
    described = [{"name": name, "i": value, "type": _INT_ATTRIBUTE} for name, value in (attributes or {}).items()]
    return _Node(op_type=operator, input=inputs, output=[output], domain=domain, attribute=described)


def _initializers(arrays: Mapping[str, NDArray[np.generic]]) -> Iterator[Any]:
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).tobytes()
        yield _Tensor(dims=array.shape, data_type=_DATA_TYPES[array.dtype.name], name=name, raw_data=content)


def _tensor_type(element: int, *dimensions: Mapping[str, int | str]) -> dict[str, Any]:
    return {"tensor_type": {"elem_type": element, "shape": {"dim": list(dimensions)}}}


def _bytes(model: Any) -> bytes:
    content: bytes = model.SerializeToString()
    return content
