"""Fields of a request to /v1/responses: what each means here, and its type.

Nothing is stored: ``store`` may be false or absent, which means false here and true to OpenAI, and a conversation is sent as a
whole in ``input``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Required, Union

from openai.types.responses import ToolChoiceAllowedParam, ToolChoiceFunctionParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_format_text_json_schema_config_param import ResponseFormatTextJSONSchemaConfigParam
from openai.types.shared_params import ResponseFormatJSONObject, ResponseFormatText
from typing_extensions import TypedDict

from tide_serve.request_fields import CHAT_FIELDS, SUPPORTED, Support, refused
from tide_serve.request_types import RequestTypes
from tide_serve.responses.input_items import InputItem
from tide_serve.stream_options import EXTENSION_TYPES
from tide_serve.structured import LarkFormat, RegexFormat

_WITH_CHAT = (
    "model", "stream", "stream_options", "temperature", "top_p", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos",
    "depth_policy", "cache_salt", "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation", "service_tier", "store",
)  # fmt: skip

RESPONSE_FIELDS: dict[str, Support] = {
    **{name: CHAT_FIELDS[name] for name in _WITH_CHAT},
    **dict.fromkeys(("input", "instructions", "max_output_tokens", "include", "text"), SUPPORTED),
    "background": refused("a response is generated while its request is open; leave it out", False),
    "context_management": refused("the context is what input holds; shorten that, and leave it out"),
    "conversation": refused("nothing is stored here; send the whole conversation as input"),
    "max_tool_calls": refused("there are no built-in tools to call; leave it out"),
    "previous_response_id": refused("nothing is stored here; send the whole conversation as input"),
    "prompt": refused("no prompt templates are stored here; send the prompt as input"),
    "reasoning": refused("the model's effort cannot be set; leave it out", {}, {"effort": "none"}),
    "truncation": refused("an input that is too long is refused; set it to disabled, or leave it out", "disabled"),
}


class FunctionTool(TypedDict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class TextConfig(TypedDict, total=False):
    format: Union[ResponseFormatText, ResponseFormatJSONObject, ResponseFormatTextJSONSchemaConfigParam, RegexFormat, LarkFormat]  # noqa: UP007
    verbosity: Literal["low", "medium", "high"] | None


class StreamOptions(TypedDict, total=False):
    include_obfuscation: bool


class _ResponseTypes(RequestTypes):
    """Types of a request whose message items may lack their ``type``. The openai package leaves all fields optional."""

    def __init__(self, extensions: Mapping[str, Any]) -> None:
        super().__init__(ResponseCreateParamsBase, extensions)
        self.required = ["model", "input"]

    def check(self, body: Mapping[str, Any]) -> None:
        if isinstance(items := body.get("input"), list):
            body = {**body, "input": [_with_type(item) for item in items]}
        super().check(body)


def _with_type(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


@cache
def response_types() -> RequestTypes:
    return _ResponseTypes(
        {
            **EXTENSION_TYPES,
            "model": str,
            "input": Union[str, list[InputItem]],  # noqa: UP007
            "tools": list[FunctionTool],
            "tool_choice": Union[Literal["none", "auto", "required"], ToolChoiceFunctionParam, ToolChoiceAllowedParam],  # noqa: UP007
            "text": TextConfig,
            "stream_options": StreamOptions,
            "presence_penalty": float,
            "frequency_penalty": float,
            "seed": int,
            "stop": Union[str, list[str]],  # noqa: UP007
        },
    )
