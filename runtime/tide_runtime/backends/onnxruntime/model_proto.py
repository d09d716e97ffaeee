"""A graph's nodes and where its weights lie, read and changed in the bytes of an ONNX file: the runtime needs no package onnx.

A message is a sequence of fields, each a varint ``number << 3 | wire type`` and a value; fields of a message that are given twice
are merged (https://protobuf.dev/programming-guides/encoding). The numbers of fields are those of
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_IR_VERSION, _OPSET = 1, 8  # of ModelProto
_GRAPH = 7  # of ModelProto
_NODE, _GRAPH_NAME, _INITIALIZER, _GRAPH_INPUT, _OUTPUT = 1, 2, 5, 11, 12  # of GraphProto
_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _OPERATOR_DOMAIN = 1, 2, 4, 5, 7  # of NodeProto
_ATTRIBUTE_NAME, _INT, _ATTRIBUTE_TYPE = 1, 3, 20  # of AttributeProto
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 9, 13, 14  # of TensorProto
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_VERSION = 2  # of OperatorSetIdProto
_VALUE_NAME, _VALUE_TYPE = 1, 2  # of ValueInfoProto
_TENSOR_TYPE, _ELEMENT_TYPE, _SHAPE = 1, 1, 2  # of TypeProto, of TypeProto.Tensor
_DIM, _DIM_VALUE, _DIM_NAME = 1, 1, 2  # of TensorShapeProto, of its Dimension
_FLOAT, _EXTERNAL = 1, 1  # of TensorProto.DataType, of TensorProto.DataLocation
_DATA_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "float16": 10}  # of TensorProto.DataType
_INT_ATTRIBUTE = 2  # of AttributeProto.AttributeType
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def external_entries(model: bytes) -> Iterator[tuple[str, str]]:
    """Key and value of every entry of external data: ``location``, ``offset``, …, of one initializer after the other.

    Raises ValueError if ``model`` is no message.
    """
    for graph in _values(model, _GRAPH):
        for tensor in _values(graph, _INITIALIZER):
            yield from map(_entry, _values(tensor, _EXTERNAL_DATA))


class GraphNode(NamedTuple):
    """A node; names of absent operands are empty."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def graph_nodes(model: bytes) -> Iterator[GraphNode]:
    """The nodes of a graph. Raises ValueError if ``model`` is no message."""
    for graph in _values(model, _GRAPH):
        for node in _values(graph, _NODE):
            inputs, outputs = (tuple(name.decode() for name in _values(node, kind)) for kind in (_INPUT, _NODE_OUTPUT))
            yield GraphNode(_text(node, _OPERATOR), inputs, outputs)


class ExternalWeight(NamedTuple):
    """An initializer whose data lie in a file: its name in the graph, value in TensorProto.DataType, and place."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    offset: int
    length: int


def external_weights(model: bytes) -> Iterator[ExternalWeight]:
    """The external weights of a graph. Raises ValueError if ``model`` is no message, KeyError if one has no length."""
    for graph in _values(model, _GRAPH):
        for tensor in _values(graph, _INITIALIZER):
            if data := dict(map(_entry, _values(tensor, _EXTERNAL_DATA))):
                shape, [data_type] = tuple(_numbers(tensor, _DIMS)), _numbers(tensor, _DATA_TYPE)
                place = int(data.get("offset", 0)), int(data["length"])
                yield ExternalWeight(_text(tensor, _NAME), data_type, shape, *place)


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

    def moved(entry: bytes) -> bytes:
        key, _ = _entry(entry)
        return _entry_message(key, location) if key == "location" else entry

    def tensor(message: bytes) -> bytes:
        return _mapped(message, _EXTERNAL_DATA, moved)

    return _mapped(model, _GRAPH, lambda graph: _mapped(graph, _INITIALIZER, tensor))


def with_output(model: bytes, name: str, data: Iterable[tuple[str, str]]) -> bytes:
    """The ``model`` with another initializer ``name``, a float [1], which is also an output; ``data``: its external data."""
    tensor = _number(_DIMS, 1) + _number(_DATA_TYPE, _FLOAT) + _message(_NAME, name.encode())
    tensor += b"".join(_message(_EXTERNAL_DATA, _entry_message(*entry)) for entry in data) + _number(_DATA_LOCATION, _EXTERNAL)
    added = _message(_INITIALIZER, tensor) + _message(_OUTPUT, _float_output(name))
    return model + _message(_GRAPH, added)  # merged with the model's graph


def with_renamed_outputs(model: bytes, names: Mapping[str, str]) -> bytes:
    """The ``model`` whose nodes write ``names[value]`` in the place of a ``value``; readers of the value stay as they are."""

    def renamed(value: bytes) -> bytes:
        return names.get(value.decode(), value.decode()).encode()

    def graph(message: bytes) -> bytes:
        return _mapped(message, _NODE, lambda node: _mapped(node, _NODE_OUTPUT, renamed))

    return _mapped(model, _GRAPH, graph)


def with_nodes(model: bytes, nodes: Iterable[bytes], arrays: Mapping[str, NDArray[np.generic]], row_input: str) -> bytes:
    """The ``model`` with further ``nodes`` (`node_message`), in any order, initializers, and an int64 input [1, tokens]."""
    shape = _message(_DIM, _number(_DIM_VALUE, 1)) + _message(_DIM, _message(_DIM_NAME, b"tokens"))
    kind = _message(_TENSOR_TYPE, _number(_ELEMENT_TYPE, _DATA_TYPES["int64"]) + _message(_SHAPE, shape))
    added = [_message(_NODE, node) for node in nodes] + _initializers(arrays)
    added.append(_message(_GRAPH_INPUT, _message(_VALUE_NAME, row_input.encode()) + _message(_VALUE_TYPE, kind)))
    return model + _message(_GRAPH, b"".join(added))  # merged with the model's graph


def integer_product(rows: NDArray[np.uint8], matrix: NDArray[np.int8]) -> bytes:
    """A model without inputs, whose output is the int32 product of ``rows`` [T, K] and ``matrix`` [K, N]."""
    node = node_message("MatMulInteger", ["rows", "matrix"], "product")
    parts = [_message(_GRAPH_NAME, b"product"), _message(_NODE, node), *_initializers({"rows": rows, "matrix": matrix})]
    graph = b"".join(parts) + _message(_OUTPUT, _message(_VALUE_NAME, b"product"))
    return _number(_IR_VERSION, 10) + _message(_OPSET, _number(_VERSION, 20)) + _message(_GRAPH, graph)


def _initializers(arrays: Mapping[str, NDArray[np.generic]]) -> list[bytes]:
    tensors = (
        b"".join(_number(_DIMS, size) for size in array.shape)
        + _number(_DATA_TYPE, _DATA_TYPES[array.dtype.name])
        + _message(_NAME, name.encode())
        + _message(_RAW_DATA, np.ascontiguousarray(array).tobytes())
        for name, array in arrays.items()
    )
    return [_message(_INITIALIZER, tensor) for tensor in tensors]


def node_message(
    operator: str, inputs: Sequence[str], output: str, domain: str = "", attributes: Mapping[str, int] | None = None
) -> bytes:
    """A node with one output."""
    message = b"".join(_message(_INPUT, name.encode()) for name in inputs) + _message(_NODE_OUTPUT, output.encode())
    message += _message(_OPERATOR, operator.encode()) + _message(_OPERATOR_DOMAIN, domain.encode())
    for name, value in (attributes or {}).items():
        attribute = _message(_ATTRIBUTE_NAME, name.encode()) + _number(_INT, value) + _number(_ATTRIBUTE_TYPE, _INT_ATTRIBUTE)
        message += _message(_ATTRIBUTE, attribute)
    return message


def _float_output(name: str) -> bytes:
    kind = _number(_ELEMENT_TYPE, _FLOAT) + _message(_SHAPE, _message(_DIM, _number(_DIM_VALUE, 1)))
    return _message(_VALUE_NAME, name.encode()) + _message(_VALUE_TYPE, _message(_TENSOR_TYPE, kind))


def _entry(message: bytes) -> tuple[str, str]:
    return _text(message, _KEY), _text(message, _VALUE)


def _text(message: bytes, number: int) -> str:
    return b"".join(_values(message, number)).decode()


def _entry_message(key: str, value: str) -> bytes:
    return _message(_KEY, key.encode()) + _message(_VALUE, value.encode())


def _values(message: bytes, number: int) -> Iterator[bytes]:
    """The values of the fields ``number``, which are messages or strings."""
    return (value for found, value, _ in _fields(message) if found == number and value is not None)


def _numbers(message: bytes, number: int) -> Iterator[int]:
    """The values of the fields ``number``, which are numbers: one by one, or packed in a string of bytes."""
    for found, value, raw in _fields(message):
        if found == number:
            packed, place = (value, 0) if value is not None else (raw, _varint(raw, 0)[1])
            while place < len(packed):
                one, place = _varint(packed, place)
                yield one


def _mapped(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """``message`` with ``change(value)`` in the fields ``number``, which are messages."""
    fields = _fields(message)
    return b"".join(raw if value is None or n != number else _message(n, change(value)) for n, value, raw in fields)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Number, value (None of numbers) and all bytes of each field."""
    place = 0
    while place < len(message):
        start = place
        tag, place = _varint(message, place)
        number = tag >> 3
        kind = tag & 7
        begin = place
        if kind == _VARINT:
            _, place = _varint(message, place)
        elif kind == _BYTES:
            length, begin = _varint(message, place)
            place = begin + length
        elif kind in (_FIXED32, _FIXED64):
            place += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if place > len(message):
            raise ValueError("cut short")
        yield number, message[begin:place] if kind == _BYTES else None, message[start:place]


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at ``place``, seven bits a byte, the lowest first, and the place after it."""
    number = shift = 0
    while place < len(message) and shift < 70:
        byte = message[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place
    raise ValueError("cut short")


def _encoded(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def _message(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(value)) + value
