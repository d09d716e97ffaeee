"""Reads the tool calls in a model's output, for programs that run models without the server: `split_calls`."""

from tide_serve.request.tool_calls import split_calls

__all__ = ["split_calls"]
