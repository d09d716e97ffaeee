"""Calibration of early exits on a frozen model: exit heads, routers, certified thresholds, and measured speeds."""
