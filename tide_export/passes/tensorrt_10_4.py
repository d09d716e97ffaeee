"""Graphs as the ONNX parser of TensorRT 10.4, the last release for V100, reads them: operators and types of opset 20 that it has.

Opsets 21 to 24 add operators, attributes and types, and change no meaning. What opset 20 or the parser lacks is an error at the
export and not on the machine with the GPU, as a parser may ignore an unknown attribute.

The table of operators is transcribed from the operator support matrix of ONNX-TensorRT 10.1 (opset 9 to 20),
https://github.com/onnx/onnx-tensorrt/blob/96e781103cfc4adf4a6bb557e94bac8e693f6f4c/docs/operators.md, and its change log up to
10.4, https://github.com/onnx/onnx-tensorrt/blob/release/10.4-GA/docs/Changelog.md: 10.2 and 10.3 add no operator, 10.4 adds three
window functions. Left out: quantized and 8-bit types, which no exported graph has, and operators outside ONNX.
"""

from __future__ import annotations

import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import is_weight

OPSET = 20
FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16"})
NUMBERS = FLOATS | {"INT32", "INT64"}
ANY = NUMBERS | {"BOOL"}

_OPERATORS = {
    FLOATS: """
        Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose Cos Cosh CumSum Dropout
        Einsum Elu Erf Exp Floor GRU Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization HardSigmoid HardSwish
        Hardmax InstanceNormalization IsInf LRN LSTM LayerNormalization LeakyRelu Log LogSoftmax LpNormalization LpPool MatMul
        MaxPool MeanVarianceNormalization PRelu Pow RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal
        Resize Round Scan Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Upsample
    """,
    FLOATS - {"BFLOAT16"}: "DeformConv GridSample Mish NonMaxSuppression NonZero RoiAlign",
    NUMBERS: """
        Abs Add ArgMax ArgMin DepthToSpace Div Equal Gelu Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean Min Mod Mul Neg
        Pad Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
        ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK
    """,
    ANY: """
        Cast CastLike Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop
        OneHot Reshape ReverseSequence Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where
    """,
    frozenset({"BOOL"}): "And Not Or Xor",
    NUMBERS - FLOATS: "BlackmanWindow HammingWindow HannWindow",
}

ELEMENT_TYPES: dict[str, frozenset[str]] = {name: types for types, names in _OPERATORS.items() for name in names.split()}
"""Operator → the element types, by ONNX's names, that its data input may have."""

CONSTANT_INPUTS: dict[str, int] = {
    name: 1 for name in ELEMENT_TYPES if name.startswith("Reduce") or name in ("CumSum", "Squeeze", "Unsqueeze", "OneHot")
}
"""Operator → the input that must be a constant (axes, depth). ``axes`` of Slice and Pad may be tensors since 10.3 and 10.4."""

REFUSED_ATTRIBUTES = frozenset({("ScatterND", "reduction")})


def declare_opset_20(model: ir.Model, context: LoweringContext) -> PassReport:
    """Raises UnsupportedModelError for a node of ONNX's own domain that opset 20 does not know."""
    nodes = [node for node in model.graph if node.domain == ""]
    unknown = sorted({problem for node in nodes if (problem := _unknown(node))})
    if unknown:
        raise UnsupportedModelError(
            f"{model.graph.name} cannot be written in ONNX opset {OPSET}, which knows no {', '.join(unknown)}; "
            "choose a target with a newer compiler (tide-export --list-targets)"
        )
    common.RemoveUnusedOpsetsPass()(model)
    model.opset_imports[""] = OPSET
    return PassReport("opset_20", len(nodes))


def _unknown(node: ir.Node) -> str:
    """The operator or attribute of ``node`` that opset 20 lacks, or an empty string."""
    try:
        schema = onnx.defs.get_schema(node.op_type, OPSET)
    except onnx.defs.SchemaError:
        return node.op_type
    unknown = sorted(set(node.attributes) - set(schema.attributes))
    return f"{node.op_type}.{unknown[0]}" if unknown else ""


def check_tensorrt_10_4(model: ir.Model, context: LoweringContext) -> PassReport:
    """Raises UnsupportedModelError that lists each operator, element type and input that is not in the parser's table."""
    common.ShapeInferencePass()(model)
    nodes = list(model.graph)
    problems = sorted({problem for node in nodes if (problem := _problem(node))})
    if problems:
        raise UnsupportedModelError(
            f"TensorRT 10.4, the last one for V100, cannot read {model.graph.name}: {'; '.join(problems)}. "
            "Export this model for another target (tide-export --list-targets)"
        )
    return PassReport("tensorrt_10_4_check", len(nodes))


def _problem(node: ir.Node) -> str:
    """Why the parser would refuse ``node``, or an empty string."""
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if name not in ELEMENT_TYPES:
        return f"it knows no {name}"
    operand = node.inputs[1 if name == "Where" else 0] if node.inputs else node.outputs[0]
    dtype = operand.dtype.name if operand.dtype is not None else "an unknown type"
    if dtype not in ELEMENT_TYPES[name]:
        return f"it has no {name} of {dtype}"
    position = CONSTANT_INPUTS.get(name)
    if position is not None and len(node.inputs) > position and not is_weight(node.inputs[position]):
        return f"{name} wants a constant as input {position}"
    refused = next((a for a in node.attributes if (name, a) in REFUSED_ATTRIBUTES), None)
    return f"{name} takes no {refused}" if refused else ""
