"""Weights in 4 and 8 bits: quantizers, and what they measure on a text."""
