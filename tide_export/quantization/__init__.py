"""Low-bit weights: blocks of integers with a scale, read from quantised checkpoints or made from full precision."""
