"""Refitting of stripped engines, with a stand-in for TensorRT."""

from types import SimpleNamespace

import pytest
from tide_runtime.backends.tensorrt.refit import refit, stripped_graph
from tide_runtime.errors import TargetError


def tensorrt(parses: bool = True, missing: tuple[str, ...] = (), accepts: bool = True) -> SimpleNamespace:
    """A stand-in for TensorRT. ``done``: refitted engines."""
    done: list[str] = []
    error = SimpleNamespace(desc=lambda: "no file weights.bin")
    parser = SimpleNamespace(
        refit_from_file=lambda path: done.append(path) or parses, num_errors=1, get_error=lambda index: error
    )
    refitter = SimpleNamespace(get_missing_weights=lambda: list(missing), refit_cuda_engine=lambda: accepts)
    return SimpleNamespace(Refitter=lambda engine, log: refitter, OnnxParserRefitter=lambda refitter, log: parser, done=done)


def test_a_graph_beside_the_engine_means_stripped(tmp_path):
    """Guards against running an engine without weights, and against refitting a complete one."""
    engine = tmp_path / "segment_0.engine"
    assert stripped_graph(engine) is None
    (tmp_path / "segment_0.onnx").touch()
    trt = tensorrt()
    refit(trt, object(), object(), stripped_graph(engine))
    assert trt.done == [str(tmp_path / "segment_0.onnx")]


@pytest.mark.parametrize(
    "trt, message",
    [
        (tensorrt(parses=False), "cannot take the weights in .*segment_0.onnx: no file weights.bin; export the model again"),
        (tensorrt(missing=("lm_head.weight",)), "segment_0 lacks lm_head.weight"),
        (tensorrt(accepts=False), "its log says why"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, trt, message):
    """Guards against an engine with wrong or missing weights."""
    with pytest.raises(TargetError, match=message):
        refit(trt, object(), object(), tmp_path / "segment_0.onnx")
