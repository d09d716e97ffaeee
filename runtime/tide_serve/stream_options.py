"""``stream`` and ``stream_options``, and the types of the fields that extend OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from openai.types.chat import ChatCompletionStreamOptionsParam

from tide_serve.errors import ApiError
from tide_serve.structured import ResponseFormat


class StreamOptionsParam(ChatCompletionStreamOptionsParam, total=False):
    """OpenAI's, and ``include_depth``: the choices of a stream have ``depths``, the layers run for each token."""

    include_depth: bool


EXTENSION_TYPES: dict[str, Any] = {
    "stream": Optional[bool],  # noqa: UP045
    "stream_options": StreamOptionsParam,
    "response_format": ResponseFormat,
    "logit_bias": dict[str, float],
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "ignore_eos": bool,
    "depth_policy": str,
    "cache_salt": str,
}


@dataclass(frozen=True)
class StreamOptions:
    """What a stream has besides text."""

    include_usage: bool = False
    include_depth: bool = False


def stream_options(body: Mapping[str, Any]) -> StreamOptions | None:
    """The options of a streamed answer; None: it is not streamed. Raises ApiError for options that are not possible."""
    options = body.get("stream_options", {})
    if not body.get("stream", False):
        if options:
            raise ApiError(400, "stream_options needs stream: true; set it, or leave the options out", "stream_options")
        return None
    if options.get("include_obfuscation", False):
        message = "stream_options.include_obfuscation is not supported: events are not padded; set it to false"
        raise ApiError(400, message, "stream_options.include_obfuscation", "unsupported_parameter")
    return StreamOptions(options.get("include_usage", False), options.get("include_depth", False))
