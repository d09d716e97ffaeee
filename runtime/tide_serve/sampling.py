"""Generation parameters of a request.

Where a request names no temperature, top_p, top_k or repetition_penalty, those that the model's authors ship with it hold
(generation_config.json; greedy where that names no temperature), as in vLLM, and not OpenAI's temperature of 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tide_runtime import GenerationParams, Grammar

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.service import Service

# Field → its range; the first number of an open range is not part of it.
_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, 1024, "a number of choices >= 1"),
    "temperature": (0, 2, "a number from 0 (greedy) to 2"),
    "top_p": (1e-9, 1, "a number above 0, up to 1 (off)"),
    "min_p": (0, 1, "a number from 0 (off) to 1"),
    "top_k": (-1, 2**31, "a number of tokens, or 0 or -1 (off)"),
    "repetition_penalty": (1e-3, 1e3, "a number above 0; 1 is off"),
    "presence_penalty": (-2, 2, "a number from -2 to 2"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2"),
    "seed": (-(2**63), 2**63 - 1, "an integer of 64 bits"),
}
_MAX_BIASES = 1024  # each costs time for every token
_SEEDS = 2**63
_TOKEN_ID = re.compile("[0-9]{1,9}")
TOP_LOGPROBS = 20


def generation_params(
    service: Service,
    body: Mapping[str, Any],
    *,
    max_new_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    more_stops: Sequence[str] = (),
) -> GenerationParams:
    """The parameters that ``body`` asks for, those of its first choice (see `of_choice`).

    Args:
        logprobs: how many of the likeliest tokens to report; 0: the chosen one only; None: no log-probabilities.

    Raises ApiError with the field's name for values out of range.
    """
    for name in _RANGES:
        if name in body:
            _check_range(name, body[name])
    check_depth_policy(service, body)
    given = {name: body[name] for name in ("temperature", "top_p", "repetition_penalty") if name in body}
    if "top_k" in body:
        given["top_k"] = max(0, body["top_k"])
    return service.engine.default_params(
        **given,
        min_p=body.get("min_p", 0.0),
        presence_penalty=body.get("presence_penalty", 0.0),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        logit_bias=_logit_bias(body, service.engine.manifest.model.vocab_size),
        seed=body["seed"] % _SEEDS if "seed" in body else None,
        stop=(*stop_strings(body, service.config), *more_stops),
        ignore_eos=body.get("ignore_eos", False),
        cache_salt=body.get("cache_salt"),
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
            raise ApiError(
                400, f"stop has a string of {len(text)} characters; give strings of 1 to {config.max_stop_chars}", "stop"
            )
    return tuple(stops)


def max_new_tokens(body: Mapping[str, Any], names: Sequence[str], config: ServeConfig, default: int) -> int:
    """The limit of tokens that the field of ``names`` asks for; ``default``, or the server's limit, where none does.

    Raises ApiError for a limit below 0, for one above the server's, and where two fields ask for different limits.
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


def check_depth_policy(service: Service, body: Mapping[str, Any]) -> None:
    """Raise ApiError for another ``depth_policy`` than the engine's, which is loaded for one policy."""
    runs = service.engine.policy.name
    if (policy := body.get("depth_policy", "auto")) not in ("auto", runs):
        raise ApiError(400, f"depth_policy is {policy!r}, this server runs {runs!r}; name that or auto", "depth_policy")


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
