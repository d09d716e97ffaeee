"""The fields of each endpoint's body: supported, harmless, or refused with a reason, and their types. All others are unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional, Required, Union

from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionMessageParam,
    ChatCompletionMessageCustomToolCallParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionToolUnionParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from typing_extensions import TypedDict

from tide_serve.request.body import BodyForm, RequestTypes, Support
from tide_serve.request.structured import ResponseFormat
from tide_serve.request.thinking import ReasoningParam


def refused(reason: str, *accepts: Any) -> Support:
    """A field that is refused with ``reason``, except with values that it ``accepts``."""
    return Support("refused", accepts, reason)


SUPPORTED, HARMLESS = Support("supported"), Support("harmless")

_SAMPLING = dict.fromkeys(
    ("model", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "temperature", "top_p", "presence_penalty",
     "frequency_penalty", "logit_bias", "logprobs",
     "top_k", "min_p", "repetition_penalty", "ignore_eos", "depth_policy", "cache_salt", "response_format"),
    SUPPORTED,
)  # fmt: skip

CHAT_FIELDS: dict[str, Support] = {
    **_SAMPLING,
    **dict.fromkeys(
        ("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"), SUPPORTED
    ),
    **dict.fromkeys(("reasoning_effort", "reasoning", "chat_template_kwargs"), SUPPORTED),
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), HARMLESS),
    "audio": refused("the model writes text only; leave it out"),
    "function_call": refused("it is the former form of tool_choice; use that"),
    "functions": refused("it is the former form of tools; use that"),
    "modalities": refused('the model writes text only; set it to ["text"], or leave it out', ["text"]),
    "moderation": refused("nothing is moderated here; leave it out"),
    "prediction": refused("the engine drafts from the prompt and has no use for a predicted text; leave it out"),
    "prompt_cache_options": refused(
        "prefixes are cached without breakpoints, for as long as there is memory; leave it out", {"mode": "implicit"}
    ),
    "service_tier": refused("there is one tier; set it to auto or default, or leave it out", "auto", "default"),
    "store": refused("nothing is stored here; set it to false, or leave it out", False),
    "verbosity": refused("the model's verbosity cannot be set; ask for it in a message, and leave it out", "medium"),
    "web_search_options": refused("nothing is searched here; leave it out"),
}

COMPLETION_FIELDS: dict[str, Support] = {
    **_SAMPLING,
    **dict.fromkeys(("prompt", "suffix", "echo", "best_of"), SUPPORTED),
    "user": HARMLESS,
}

EMBEDDING_FIELDS: dict[str, Support] = {
    **dict.fromkeys(("model", "input", "encoding_format", "dimensions"), SUPPORTED),
    "user": HARMLESS,
}

RERANK_FIELDS: dict[str, Support] = {
    **dict.fromkeys(("model", "query", "documents", "top_n", "return_documents", "instruction"), SUPPORTED),
    "user": HARMLESS,
}

# Clients send messages back as they came, with fields of answers and of streams. Those without a meaning for a model are ignored.


class CalledFunctionParam(Function, total=False):
    parsed_arguments: Any


class CallParam(ChatCompletionMessageFunctionToolCallParam, total=False):
    function: Required[CalledFunctionParam]  # type: ignore[misc]
    index: int | None


class AnswerMessageParam(ChatCompletionAssistantMessageParam, total=False):
    """An assistant's message."""

    tool_calls: Iterable[CallParam | ChatCompletionMessageCustomToolCallParam] | None  # type: ignore[misc]
    name: str | None  # type: ignore[misc]
    id: str | None
    annotations: list[Any] | None
    parsed: Any
    provider_specific_fields: dict[str, Any] | None
    reasoning_content: str | None
    reasoning: str | None


class ToolMessageParam(ChatCompletionToolMessageParam, total=False):
    """What a call has returned."""

    name: str | None


class UserMessageParam(ChatCompletionUserMessageParam, total=False):
    name: str | None  # type: ignore[misc]


class SystemMessageParam(ChatCompletionSystemMessageParam, total=False):
    name: str | None  # type: ignore[misc]


class DeveloperMessageParam(ChatCompletionDeveloperMessageParam, total=False):
    name: str | None  # type: ignore[misc]


MessageParam = Union[  # noqa: UP007
    DeveloperMessageParam,
    SystemMessageParam,
    UserMessageParam,
    AnswerMessageParam,
    ToolMessageParam,
    ChatCompletionFunctionMessageParam,
]


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

THOUGHT_TYPES: dict[str, Any] = {"reasoning": ReasoningParam, "chat_template_kwargs": dict[str, Any]}


class TokenizeParams(TypedDict, total=False):
    model: str
    prompt: str
    add_special_tokens: bool
    messages: Iterable[MessageParam]
    tools: Iterable[ChatCompletionToolUnionParam]
    return_token_strs: bool


class DetokenizeParams(TypedDict, total=False):
    model: str
    tokens: Required[Iterable[int]]


class DocumentParam(TypedDict):
    text: str


class RerankParams(TypedDict, total=False):
    model: str
    query: Required[str]
    documents: Required[list[Union[str, DocumentParam]]]  # noqa: UP007
    top_n: int
    return_documents: bool
    instruction: str
    user: str


CHAT = BodyForm(
    "ChatCompletionRequest",
    CHAT_FIELDS,
    lambda: RequestTypes(ChatParams, {**EXTENSION_TYPES, **THOUGHT_TYPES, "messages": list[MessageParam]}),
)
COMPLETION = BodyForm("CompletionRequest", COMPLETION_FIELDS, lambda: RequestTypes(CompletionParams, EXTENSION_TYPES))
EMBEDDING = BodyForm(
    "EmbeddingRequest",
    EMBEDDING_FIELDS,
    lambda: RequestTypes(EmbeddingCreateParams, {"input": Union[str, list[str], list[int], list[list[int]]]}),  # noqa: UP007
)
RERANK = BodyForm("RerankRequest", RERANK_FIELDS, lambda: RequestTypes(RerankParams, {}))
TOKENIZE = BodyForm(
    "TokenizeRequest", dict.fromkeys(TokenizeParams.__annotations__, SUPPORTED), lambda: RequestTypes(TokenizeParams, {})
)
DETOKENIZE = BodyForm(
    "DetokenizeRequest", dict.fromkeys(DetokenizeParams.__annotations__, SUPPORTED), lambda: RequestTypes(DetokenizeParams, {})
)
