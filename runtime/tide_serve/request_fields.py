"""What each field of a request means here: supported, harmless, or refused with a reason. Other fields are refused as unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tide_serve.errors import ApiError


@dataclass(frozen=True)
class Support:
    """What becomes of a field.

    Args:
        kind: ``harmless`` fields are accepted and change nothing, as they ask for nothing about the answer.
        accepts: of a refused field, values that ask for what happens anyway.
        reason: why others are refused, and what to do.
    """

    kind: Literal["supported", "harmless", "refused"]
    accepts: tuple[Any, ...] = ()
    reason: str = ""


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
    "reasoning_effort": refused("the model's effort cannot be set; leave it out", "none"),
    "service_tier": refused("there is one tier; set it to auto or default, or leave it out", "auto", "default"),
    "store": refused("nothing is stored here; set it to false, or leave it out", False),
    "verbosity": refused("the model's verbosity cannot be set; ask for it in a message, and leave it out", "medium"),
    "web_search_options": refused("nothing is searched here; leave it out"),
}

COMPLETION_FIELDS: dict[str, Support] = {
    **_SAMPLING,
    **dict.fromkeys(("prompt", "echo", "best_of"), SUPPORTED),
    "user": HARMLESS,
    "suffix": refused("the model continues text and cannot fill a gap; leave it out", ""),
}

TOKENIZE_FIELDS: dict[str, Support] = dict.fromkeys(
    ("model", "prompt", "add_special_tokens", "messages", "tools", "return_token_strs"), SUPPORTED
)
DETOKENIZE_FIELDS: dict[str, Support] = dict.fromkeys(("model", "tokens"), SUPPORTED)


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Support]) -> None:
    """Raise ApiError for the first field of ``body`` that ``fields`` lacks or refuses."""
    for name, value in body.items():
        support = fields.get(name)
        if support is None:
            raise ApiError(400, f"the field {name!r:.80} is not known here; leave it out", name[:80], "unknown_parameter")
        # True equals 1 to Python, and is another value to a client.
        accepted = any(type(value) is type(same) and value == same for same in support.accepts)
        if support.kind == "refused" and not accepted:
            raise ApiError(400, f"{name} is not supported: {support.reason}", name, "unsupported_parameter")
