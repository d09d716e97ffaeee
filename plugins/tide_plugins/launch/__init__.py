"""Launching kernels on other libraries' tensors: checked once where they come in, then enqueued as often as wanted."""
