"""The bodies of OpenAI's routes but /v1/responses: what is honoured, what is refused, and what is known to have no effect.

Fields of vLLM, llama.cpp and Ollama that mean the same as others are honoured, see `tide_serve.request.other_servers`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tide_serve.request.body import BodyForm, BodyTypes, OneOf, Part, Refused

# --- parts


class TextPart(Part):
    type: Literal["text"]
    text: str


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


class Other(Part):
    """A tool or a part of what a call returned that is of no use to a text model. It is left out as a whole."""

    model_config = ConfigDict(extra="ignore")
    type: str
    source: dict[str, Any] | None = None


class Schema(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class PlainFormat(Part):
    type: Literal["text", "json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchemaFormat(Part):
    type: Literal["json_schema"]
    json_schema: Schema


class RegexFormat(Part):
    type: Literal["regex"]
    pattern: str


class LarkFormat(Part):
    type: Literal["lark"]
    grammar: str


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat | RegexFormat | LarkFormat, OneOf()]


class StructuredOutputs(Part):
    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(Part):
    """OpenAI's, and ``include_depth``: the choices of a stream have ``depths``, the layers run for each token."""

    include_usage: bool | None = None
    include_depth: bool | None = None


class Reasoning(Part):
    """``enabled`` turns thoughts on or off, ``effort`` is ``reasoning_effort``, ``max_tokens`` ends them after so many tokens."""

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None


# --- messages and tools


class AskingMessage(Part):
    role: Literal["system", "developer", "user"]
    content: Annotated[str | list[TextPart], OneOf()]
    name: str | None = None


class CalledFunction(Part):
    name: str
    arguments: str


class Call(Part):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Part):
    role: Literal["assistant"]
    content: Annotated[str | list[Annotated[TextPart | RefusalPart, OneOf()]], OneOf()] | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(Part):
    role: Literal["tool"]
    content: Annotated[str | list[Annotated[TextPart | Other, OneOf()]], OneOf()]
    tool_call_id: str
    name: str | None = None


Message = Annotated[AskingMessage | AnswerMessage | ToolMessage, OneOf("role")]


class Function(Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Part):
    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    name: str


class FunctionChoice(Part):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedChoice(Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = list[Annotated[FunctionTool | Other, OneOf()]]
ToolChoice = Annotated[Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice, OneOf()]
Stop = Annotated[str | list[str], OneOf()]
Texts = Annotated[str | list[str] | list[int] | list[list[int]], OneOf()]

# --- bodies


class Sampling(Part):
    """Fields of all routes that write text; from ``repeat_penalty`` on those of other servers."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    depth_policy: str | None = None
    cache_salt: str | None = None
    repeat_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    guided_json: Annotated[dict[str, Any] | str, OneOf()] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


class ChatSampling(Sampling):
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    enable_thinking: bool | None = None
    think: Annotated[bool | str, OneOf()] | None = None


class Choices(Part):
    n: int | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None


class ChatBody(ChatSampling, Choices):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: dict[str, Any] | None = None


class CompletionBody(Sampling, Choices):
    prompt: Texts
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None


class EmbeddingBody(Part):
    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Document(Part):
    text: str


class RerankBody(Part):
    model: str | None = None
    query: str
    documents: list[Annotated[str | Document, OneOf()]]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class TokenizeBody(Part):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Part):
    model: str | None = None
    tokens: list[int]


# --- what is refused, and what has no effect

# Options of vLLM, llama.cpp and others that this engine does not have → the value that is off.
_OFF: dict[str, Any] = {
    "min_tokens": 0, "n_predict": -1, "num_predict": -1, "length_penalty": 1, "no_repeat_ngram_size": 0, "use_beam_search": False,
    "typical_p": 1, "typ_p": 1, "tfs_z": 1, "top_a": 0, "top_n_sigma": -1, "mirostat": 0, "dynatemp_range": 0,
    "xtc_probability": 0, "dry_multiplier": 0, "bad_words": [], "allowed_token_ids": [], "logits_processors": [], "samplers": [],
    "lora": [], "include_stop_str_in_output": False, "truncate_prompt_tokens": -1, "chat_template": "", "documents": [],
    "options": {},
}  # fmt: skip
CHAT_REFUSED = {
    **{name: Refused(f"there is no such option here; leave it out, or set it to {off!r}", (off,)) for name, off in _OFF.items()},
    "audio": Refused("the model writes text only; leave it out"),
    "function_call": Refused("it is the former form of tool_choice; use that"),
    "functions": Refused("it is the former form of tools; use that", ([],)),
    "modalities": Refused('the model writes text only; set it to ["text"], or leave it out', (["text"],)),
    "web_search_options": Refused("nothing is searched here; leave it out"),
    "echo": Refused("the prompt is not repeated in an answer; leave it out", (False,)),
}
HARMLESS = frozenset({
    *_OFF,
    "user", "metadata", "client_metadata", "safety_identifier", "store", "service_tier", "verbosity", "prediction", "background",
    "truncation", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "include_obfuscation", "max_tool_calls",
    "context_management", "betas", "diagnostics", "container", "inference_geo", "speed", "cache_control",
    "copilot_cache_control", "citations", "caller", "allowed_callers", "defer_loading", "input_examples",
    "eager_input_streaming", "display", "signature", "data", "summary", "generate_summary", "encrypted_content", "annotations",
    "logprobs", "id", "status", "phase", "namespace", "index", "parsed", "parsed_arguments", "provider_specific_fields",
    "thinking_blocks", "reasoning_details", "num_ctx", "keep_alive", "cache_prompt", "id_slot", "return_progress",
    "timings_per_token", "priority", "spaces_between_special_tokens", "source",
})  # fmt: skip


def form(model: type[Part], refused: dict[str, Refused]) -> BodyForm:
    return BodyForm(BodyTypes(model, HARMLESS), refused)


def chat_fields_elsewhere(model: type[Part]) -> dict[str, Refused]:
    """Fields that change the answer of a chat, and that the route of ``model`` calls otherwise or does not have."""
    names = ChatBody.model_fields.keys() - model.model_fields.keys()
    names -= {"thinking", "stream_options", "logprobs", "top_logprobs", "parallel_tool_calls"}
    reason = "it is a field of /v1/chat/completions, and not of this route; leave it out"
    return {**CHAT_REFUSED, **{name: Refused(reason, (1,) if name == "n" else ()) for name in names}}


CHAT = form(ChatBody, CHAT_REFUSED)
COMPLETION = form(CompletionBody, {n: r for n, r in chat_fields_elsewhere(CompletionBody).items() if n != "echo"})
EMBEDDING = form(EmbeddingBody, {"truncate": Refused("a text that is too long is refused; leave it out", (False,))})
RERANK = form(RerankBody, {})
TOKENIZE = form(TokenizeBody, {})
DETOKENIZE = form(DetokenizeBody, {})
