"""Everything that only a GPU can tell, from one command: python3 -m benchmarks.gpu.kit. See docs/gpu-kit.md."""
