"""Drafters that a checkpoint brings along: EAGLE-3 heads and multi-token-prediction layers."""
