"""The body of a request to /v1/messages: Anthropic's fields, as far as a text model takes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tide_serve.request.body import OneOf, Part
from tide_serve.request.fields import ChatSampling, Other, TextPart


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    type: Literal["redacted_thinking"]  # thoughts that only another server can read; they are left out


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[Annotated[TextPart | Other, OneOf()]], OneOf()] | None = None
    is_error: bool | None = None


class AskingMessage(Part):
    role: Literal["user", "system"]
    content: Annotated[str | list[Annotated[TextPart | ToolResultBlock, OneOf()]], OneOf()]


Block = Annotated[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, OneOf()]


class AssistantMessage(Part):
    role: Literal["assistant"]
    content: Annotated[str | list[Block], OneOf()]


class Tool(Part):
    type: Literal["custom"] | None = None
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(Part):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Part):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(ChatSampling):
    """The body of /v1/messages/count_tokens."""

    messages: list[Annotated[AskingMessage | AssistantMessage, OneOf("role")]]
    system: Annotated[str | list[TextPart], OneOf()] | None = None
    tools: list[Annotated[Tool | Other, OneOf(default="custom")]] | None = None
    tool_choice: Annotated[ToolChoice | NamedTool, OneOf()] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None


class MessageBody(CountBody):
    max_tokens: int
