"""The fused router in TensorRT engines: two ahead-of-time plugins in place of the operators of the router's function.

The parser reads the function as TensorRT's own operators (`router_function`). Here the network's score comes from the plugins
instead, and the builder drops the operators, which no output needs any more. The kernels are part of the engine: nothing is
loaded where it runs. Releases before 10.9 and TensorRT-RTX have no such plugins, and their engines keep the operators.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from tide_plugins.trt.aot import add_exit_router, ptx, registered
from tide_runtime.errors import TargetError

from tide_export.graphs.router_function import NAME
from tide_export.targets.graph_files import GraphFile

SCORE = "score"


def router_key() -> str:
    """Part of the cache key of engines with the plugins, which hold the kernels.

    Raises TargetError when this TensorRT has no ahead-of-time plugins, or the kernels cannot be compiled here.
    """
    registered()
    return f", router plugin {hashlib.sha256(ptx().encode()).hexdigest()[:8]}"


def put_router(trt: Any, network: Any, file: GraphFile) -> list[NDArray[np.float32]]:
    """Let the plugins compute the score of ``network`` of module ``trt``, parsed from ``file``, if it has a router.

    Returns the weights, which have to live until the engine is built.
    """
    if not file.operators[NAME]:
        return []
    hidden, weights, epsilon = _router(file)
    states = _named(network.num_inputs, network.get_input, hidden, network)
    operators = _named(network.num_outputs, network.get_output, SCORE, network)
    constants = [network.add_constant(array.shape, trt.Weights(array)).get_output(0) for array in weights]
    score = add_exit_router(network, states, *constants, epsilon=epsilon)
    network.unmark_output(operators)
    operators.name = f"{SCORE} of the operators"
    score.name = SCORE
    network.mark_output(score)
    return weights


def _router(file: GraphFile) -> tuple[str, list[NDArray[np.float32]], float]:
    """The name of the router's states, its weights (down, down_bias, up, up_bias), and its epsilon."""
    graph = ir.load(file.path).graph
    (node,) = (node for node in graph if node.op_type == NAME)
    states, *weights = node.inputs
    assert states is not None
    arrays = [np.ascontiguousarray(value.const_value.numpy()) for value in weights if value and value.const_value]
    if node.outputs[0].name != SCORE or states not in graph.inputs or len(arrays) != len(weights):
        raise TargetError(f"{file.name}: its router's states or weights are computed. Please report the model's config")
    return str(states.name), arrays, float(node.attributes["epsilon"].as_float())


def _named(count: int, get: Any, name: str, network: Any) -> Any:
    """The tensor of that name among the network's inputs or outputs."""
    tensors = {tensor.name: tensor for tensor in map(get, range(count))}
    if name not in tensors:
        raise TargetError(f"{network.name} has no tensor {name} after parsing. Please report the model's config")
    return tensors[name]
