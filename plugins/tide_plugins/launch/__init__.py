"""Launches of kernels on tensors of other libraries: checked once when prepared, then enqueued any number of times."""
