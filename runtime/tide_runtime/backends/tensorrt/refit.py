"""Put the weights into a stripped TensorRT engine (``tide-export --strip-weights``) from the graph that it was built from.

It has not run on a GPU yet; its calls are checked against TensorRT's bindings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tide_runtime.errors import TargetError


def stripped_graph(engine: Path) -> Path | None:
    """The ONNX graph next to a stripped engine file; None for an engine with weights."""
    graph = engine.with_suffix(".onnx")
    return graph if graph.is_file() else None


def refit(trt: Any, engine: Any, log: Any, graph: Path) -> None:
    """Fill the deserialized ``engine`` with the weights of ``graph``, whose external weights are next to it.

    Args:
        trt: the module ``tensorrt``.
        engine: a deserialized engine.
        log: the logger that the engine's runtime was made with.

    Raises TargetError when a weight is missing or is not the one that the engine was built with.
    """
    refitter = trt.Refitter(engine, log)
    parser = trt.OnnxParserRefitter(refitter, log)
    if not parser.refit_from_file(str(graph)):
        problems = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise TargetError(f"the engine of {graph.stem} cannot take the weights in {graph}: {problems}; export the model again")
    missing = refitter.get_missing_weights()
    if missing or not refitter.refit_cuda_engine():
        named = ", ".join(missing[:5]) or "no weight, but TensorRT refuses; its log says why"
        raise TargetError(f"the engine of {graph.stem} lacks {named}; export the model again")
