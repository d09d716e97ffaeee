"""TIDE's kernels inside TensorRT engines, as ahead-of-time Python plugins (`aot`)."""
