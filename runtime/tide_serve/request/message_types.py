"""The types of a request to /v1/messages: those of the anthropic package, narrowed to what a text model takes.

The package takes over a second to import, so this is imported with the first of these requests.
"""

from __future__ import annotations

from typing import Any, Literal, Required, Union

from anthropic.types import TextBlockParam, ThinkingBlockParam, ToolResultBlockParam, ToolUseBlockParam
from anthropic.types.cache_control_ephemeral_param import CacheControlEphemeralParam
from anthropic.types.message_create_params import MessageCreateParamsBase
from typing_extensions import TypedDict

from tide_serve.request.body import RequestTypes
from tide_serve.request.fields import EXTENSION_TYPES


class TextBlock(TextBlockParam, total=False):
    """A text. The sources that an earlier answer has named have no meaning for the model."""

    citations: list[Any] | None  # type: ignore[misc]


class ToolUseBlock(ToolUseBlockParam, total=False):
    caller: Any  # type: ignore[misc]
    toolset_name: None  # type: ignore[misc]


class ToolResultBlock(ToolResultBlockParam, total=False):
    content: Union[str, list[TextBlock]]  # type: ignore[misc]  # noqa: UP007
    toolset_name: None  # type: ignore[misc]


class UserMessage(TypedDict, total=False):
    role: Required[Literal["user"]]
    content: Required[Union[str, list[Union[TextBlock, ToolResultBlock]]]]  # noqa: UP007


class AssistantMessage(TypedDict, total=False):
    role: Required[Literal["assistant"]]
    content: Required[Union[str, list[Union[TextBlock, ThinkingBlockParam, ToolUseBlock]]]]  # noqa: UP007


class SystemMessage(TypedDict, total=False):
    role: Required[Literal["system"]]
    content: Required[Union[str, list[TextBlock]]]  # noqa: UP007


class Tool(TypedDict, total=False):
    """A tool that the client runs. What changes nothing here is accepted: how its input is streamed, and how it is cached."""

    name: Required[str]
    input_schema: Required[dict[str, Any]]
    description: str | None
    strict: bool | None
    type: Literal["custom"] | None
    cache_control: CacheControlEphemeralParam | None
    eager_input_streaming: bool | None
    defer_loading: Literal[False] | None
    allowed_callers: list[Literal["direct"]] | None


def message_types(required: tuple[str, ...]) -> RequestTypes:
    """Raises what importing the anthropic package raises."""
    return RequestTypes(
        MessageCreateParamsBase,
        {
            **EXTENSION_TYPES,
            "model": str,
            "messages": list[Union[UserMessage, AssistantMessage, SystemMessage]],  # noqa: UP007
            "system": Union[str, list[TextBlock]],  # noqa: UP007
            "tools": list[Tool],
            "temperature": float,
            "top_p": float,
            "presence_penalty": float,
            "frequency_penalty": float,
            "seed": int,
        },
        required,
    )
