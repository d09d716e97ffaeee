"""What can be told of a GPU target's graphs without the GPU: their logits on the CPU, and what an engine's plan says of itself.

The serialized plan of a TensorRT-RTX 1.7 engine is read without loading it.

A plan holds a listing for each optimization profile: tensors with type and size, then the operations of a step between ``main {``
and ``}``. The format is not documented; the tests that use it say so when a release changes it.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

_MAIN = re.compile(r"\nmain \{\n(.*?)\n\}", re.DOTALL)


def host_copies(plan: bytes) -> int:
    """Copies between host and device in the operations of a step, over all profiles of a serialized engine."""
    lines = (line.strip() for main in _MAIN.findall(plan.decode("latin-1")) for line in main.splitlines())
    return sum(1 for line in lines if re.match(r'copy=\{ name="copy_(h2d|d2h)', line))


def logits_on_cpu(model: ir.Model, ids: NDArray[np.int64], steps: Sequence[int], slots: int) -> NDArray[np.float32]:
    """Logits [T, V] of one sequence ``ids`` [T], over fp32 caches of ``slots`` that are empty at first.

    Args:
        model: in fp32, whole; DequantizeLinear before MatMul is computed with fp32 activations.
        steps: tokens of each step, T in all.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3  # else a warning for every cache update that is not in place
    # ONNX Runtime makes DequantizeLinear and MatMul one MatMulNBits, which by default rounds activations to int8.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    inputs, names = session.get_inputs(), [value.name for value in session.get_outputs()]
    caches = {v.name: np.zeros((1, v.shape[1], slots, v.shape[3]), np.float32) for v in inputs if "_cache_" in v.name}
    logits, start = [], 0
    for count in steps:
        given = caches | _positions(start, count) | {"input_ids": ids[None, start : start + count]}
        found = dict(zip(names, session.run(names, {value.name: given[value.name] for value in inputs}), strict=True))
        caches = {name: found[name.replace("_cache_", "_cache_out_")] for name in caches}
        logits.append(found["logits"].reshape(count, -1))
        start += count
    return np.concatenate(logits)


def _positions(start: int, count: int) -> dict[str, NDArray[Any]]:
    """The position inputs that any lowering reads, for ``count`` tokens behind ``start`` cached ones."""
    end = start + count
    return {
        "position_ids": np.arange(start, end)[None],
        "write_index": np.array([start]),
        "seqlens_k": np.array([end - 1], np.int32),
        "total_sequence_length": np.array(end, np.int32),
        "logits_index": np.arange(count),
    }
