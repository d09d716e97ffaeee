"""Passes for V100: they lower graphs to the operators that TensorRT 10.4, the last release for it, can read.

That release lacks attention, cache update and RMSNormalization, and prefers a model's function to a plugin of the same name: the
passes decompose all of them into operators of opset 20. Rotary embedding keeps the operators of the traced model. The graphs are
checked against the parser's table and executed by ONNX Runtime; none has run on a V100 yet.
"""

from __future__ import annotations

from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.base import GraphPass
from tide_export.passes.canonicalize import canonicalize
from tide_export.passes.decompose_rms_norm import decompose_rms_norm
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.guard_token import guard_token
from tide_export.passes.inline_functions import inline_functions
from tide_export.passes.opset_20 import declare_opset_20
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.static_caches import static_caches
from tide_export.passes.static_reshape import static_reshape
from tide_export.passes.tensorrt_10_4_check import check_tensorrt_10_4

WHOLE: tuple[GraphPass, ...] = (QuantizeWeights(()), canonicalize, static_reshape, fold_weights)
_LAYERS: tuple[GraphPass, ...] = (inline_functions, static_caches, lower_attention_primitives, decompose_rms_norm)
_CHECKS: tuple[GraphPass, ...] = (declare_opset_20, check_tensorrt_10_4)
PIECES = (*_LAYERS, guard_token, *_CHECKS)
KV_FILL = (*_LAYERS, *_CHECKS)
