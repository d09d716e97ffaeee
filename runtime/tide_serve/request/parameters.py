"""Parameters of a request: sampling, limits, and what a stream has.

Where a request names no temperature, top_p, top_k, min_p or repetition_penalty, those that the model's authors ship with it hold
(generation_config.json; greedy where that names no temperature), as in vLLM, and not OpenAI's temperature of 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide_runtime import Engine, GenerationParams, Grammar

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError

# Ranges where OpenAI's API, or safe arithmetic, is narrower than `GenerationParams`, which checks all others.
_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, 1024, "a number of choices >= 1"),
    "temperature": (0, 2, "a number from 0 (greedy) to 2"),
    "top_k": (-1, 2**31, "a number of tokens, or 0 or -1 (off)"),
    "repetition_penalty": (1e-3, 1e3, "a number above 0; 1 is off"),
    "seed": (-(2**63), 2**63 - 1, "an integer of 64 bits"),
}
_WITH_MODEL_DEFAULT = ("temperature", "top_p", "min_p", "repetition_penalty")
_SAME = ("presence_penalty", "frequency_penalty", "ignore_eos", "cache_salt")  # here and in `GenerationParams`
_MAX_BIASES = 1024  # each costs time for every token
_SEEDS = 2**63
_TOKEN_ID = re.compile("[0-9]{1,9}")
_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class StreamOptions:
    """What the events of a stream have in addition to text."""

    include_usage: bool = False
    include_depth: bool = False


def stream_options(body: Mapping[str, Any]) -> StreamOptions | None:
    """The options of a streamed answer; None: it is not streamed. Raises ApiError for options that are not possible."""
    options = body.get("stream_options", {})
    if not body.get("stream", False):
        if options:
            raise ApiError(400, "stream_options needs stream: true; set it, or leave the options out", "stream_options")
        return None
    return StreamOptions(options.get("include_usage", False), options.get("include_depth", False))


def generation_params(
    engine: Engine,
    config: ServeConfig,
    body: Mapping[str, Any],
    *,
    max_new_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    more_stops: Sequence[str] = (),
) -> GenerationParams:
    """The parameters of the first choice that ``body`` describes (see `of_choice`).

    Args:
        logprobs: how many of the likeliest tokens to report; 0: the chosen one only; None: no log-probabilities.

    Raises ApiError or ParamsError with the field's name for values out of range.
    """
    for name in _RANGES:
        if name in body:
            _check_range(name, body[name])
    runs = engine.policy.name
    if (policy := body.get("depth_policy", "auto")) not in ("auto", runs):
        raise ApiError(400, f"depth_policy is {policy!r}, this server runs {runs!r}; name that or auto", "depth_policy")
    fields: dict[str, Any] = {name: body[name] for name in (*_WITH_MODEL_DEFAULT, *_SAME) if name in body}
    if "top_k" in body:
        fields["top_k"] = max(0, body["top_k"])
    if body.get("stop_token_ids"):
        fields["eos_token_ids"] = (*engine.manifest.generation.eos_token_ids, *body["stop_token_ids"])
    if not body.get("skip_special_tokens", True) and engine.tokenizer is not None:
        fields["shown_tokens"] = tuple(engine.tokenizer.special_ids)
    return engine.default_params(
        **fields,
        logit_bias=_logit_bias(body, engine.manifest.model.vocab_size),
        seed=body["seed"] % _SEEDS if "seed" in body else None,
        stop=(*stop_strings(body, config), *more_stops),
        max_new_tokens=max_new_tokens,
        logprobs=max(1, logprobs) if logprobs is not None else 0,  # the engine reports nothing for 0
        grammar=grammar,
    )


def of_choice(params: GenerationParams, choice: int) -> GenerationParams:
    """``params`` of choice number ``choice`` of a prompt: a seed gives each choice another one, counted up from it."""
    return params if params.seed is None or choice == 0 else replace(params, seed=(params.seed + choice) % _SEEDS)


def stop_strings(body: Mapping[str, Any], config: ServeConfig) -> tuple[str, ...]:
    """The ``stop`` strings, of which there may be one or a list. Raises ApiError beyond the limits of ``config``."""
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > config.max_stop_strings:
        raise ApiError(400, f"stop has {len(stops)} strings; give at most {config.max_stop_strings}", "stop")
    for text in stops:
        if not 0 < len(text) <= config.max_stop_chars:
            message = f"stop has a string of {len(text)} characters; give strings of 1 to {config.max_stop_chars}"
            raise ApiError(400, message, "stop")
    return tuple(stops)


def max_new_tokens(body: Mapping[str, Any], names: Sequence[str], config: ServeConfig, default: int) -> int:
    """The limit of tokens in the field of ``names``; ``default``, or the server's limit, where ``body`` has none of them.

    Raises ApiError for a limit below 0, for one above the server's, and where two fields have different limits.
    """
    given = [(name, body[name]) for name in names if name in body]
    limit = config.max_tokens
    for name, value in given:
        if value < 0 or (limit is not None and value > limit):
            allowed = "a number of tokens >= 0" if limit is None else f"0 to {limit} tokens"
            raise ApiError(400, f"{name} is {value}; set it to {allowed}", name)
    if len({value for _, value in given}) > 1:
        raise ApiError(400, f"{' and '.join(names)} differ; give one of them", given[0][0])
    return int(given[0][1]) if given else min(default, limit or default)


def choices(body: Mapping[str, Any], config: ServeConfig, num_prompts: int = 1) -> int:
    """The number of choices for each prompt. Raises ApiError where there are too many over all prompts."""
    n: int = body.get("n", 1)
    _check_range("n", n)
    if n * num_prompts > config.max_choices:
        wanted = f"n is {n}" if num_prompts == 1 else f"{num_prompts} prompts with n {n} are {n * num_prompts} choices"
        raise ApiError(400, f"{wanted}; ask for at most {config.max_choices} at once", "n" if n > 1 else "prompt")
    return n


def checked_top_logprobs(top: int | None, name: str) -> int | None:
    """``top``, the value of field ``name``. Raises ApiError beyond OpenAI's limit."""
    if top is not None and not 0 <= top <= _TOP_LOGPROBS:
        raise ApiError(400, f"{name} is {top}; set it to a number from 0 to {_TOP_LOGPROBS}", name)
    return top


def _check_range(name: str, value: float) -> None:
    least, most, allowed = _RANGES[name]
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {value}; set it to {allowed}", name)


def _logit_bias(body: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: Mapping[str, float] = body.get("logit_bias", {})
    if len(biases) > _MAX_BIASES:
        raise ApiError(400, f"logit_bias has {len(biases)} tokens; give at most {_MAX_BIASES}", "logit_bias")
    pairs = []
    for token, bias in biases.items():
        if not (_TOKEN_ID.fullmatch(token) and int(token) < vocab_size and abs(bias) <= 100):
            allowed = f"token ids from 0 to {vocab_size - 1} and biases from -100 to 100"
            raise ApiError(400, f"logit_bias has {token!r:.40}: {bias}; give {allowed}", "logit_bias")
        pairs.append((int(token), bias))
    return tuple(pairs)
