"""The ONNX operators that the parser of TensorRT 10.4, the last release for V100, reads, and the element types of each.

Transcribed from the operator support matrix of ONNX-TensorRT 10.1 (opset 9 to 20),
https://github.com/onnx/onnx-tensorrt/blob/96e781103cfc4adf4a6bb557e94bac8e693f6f4c/docs/operators.md, and its change log up to
10.4, https://github.com/onnx/onnx-tensorrt/blob/release/10.4-GA/docs/Changelog.md: 10.2 and 10.3 add no operator, 10.4 adds three
window functions. Left out: quantized and 8-bit types, which no exported graph has, and operators outside ONNX.
"""

from __future__ import annotations

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
