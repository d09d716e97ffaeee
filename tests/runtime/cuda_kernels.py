"""The operators that ONNX Runtime's CUDA provider has kernels for, of those that TIDE's graphs use."""

# Read from libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1: the kernels' classes are named in its type information.
CUDA_KERNELS = {
    *(("", name) for name in ("Abs", "Add", "ArgMax", "Cast", "Concat", "Cos", "Div", "Expand", "Gather", "LayerNormalization")),
    *(("", name) for name in ("LessOrEqual", "MatMul", "Mul", "Neg", "RMSNormalization", "ReduceMax", "Reshape", "Sigmoid")),
    *(("", name) for name in ("Sin", "Slice", "Softmax", "Split", "Sub", "Tanh", "TensorScatter", "Transpose", "Unsqueeze")),
    ("", "Where"),
    *(("com.microsoft", name) for name in ("FusedMatMul", "GroupQueryAttention", "RotaryEmbedding")),
    *(("com.microsoft", name) for name in ("GatherBlockQuantized", "MatMulNBits")),
    *(("com.microsoft", name) for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
}
