"""Checkpoints that are quantised already: GPTQ, AWQ, compressed-tensors, bitsandbytes."""
