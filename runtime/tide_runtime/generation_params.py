"""What a caller may ask of one generation: length, sampling, stopping, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from tide_runtime.errors import ParamsError
from tide_runtime.text.grammar import Grammar
from tide_runtime.text.thoughts import Thoughts

BIAS_LIMIT = 100.0
PENALTY_LIMIT = 2.0


@dataclass(frozen=True)
class GenerationParams:
    """Parameters of one generation; checked on construction, `ParamsError` names the field and its allowed range.

    Args:
        max_new_tokens: tokens to generate at most, >= 1.
        temperature: 0 is greedy; above 0, logits are divided by it before sampling.
        top_k: sample among the k likeliest tokens; 0 is off.
        top_p: sample among the fewest tokens whose probabilities reach this sum, in (0, 1]; 1 is off.
        min_p: drop tokens less likely than `min_p` times the likeliest, in [0, 1]; 0 is off.
        repetition_penalty: greater than 0; above 1 makes tokens of the prompt and output less likely; 1 is off.
        presence_penalty, frequency_penalty: taken from the logits of tokens in the output, once, and once for each time they are
            in it; in [-2, 2] (https://platform.openai.com/docs/api-reference/chat/create).
        logit_bias: (token id, bias in [-100, 100]), added to the logits of these tokens; a mapping will do.
        grammar: the language that the output must belong to (`Grammar`), or the answer behind its thoughts; needs llguidance.
        thoughts: how the output thinks (`Thoughts`). Stop strings and grammar then apply behind the thoughts, and the text has
            the marks around them, also those that are special tokens; None: all of it is answer.
        seed: makes sampling reproducible, >= 0: a prompt's text is the same under policies ``full`` and ``exact``, beside any
            other prompts, and at any place in its call, so several samples of a prompt take several seeds. None draws a new seed
            for each sequence.
        stop: strings that end the text; the text shown ends before them. They may spell special tokens, which no text has.
        shown_tokens: ids of special tokens that the text has all the same, such as those that mark calls of tools.
        eos_token_ids: token ids that end the text; None uses the model's.
        ignore_eos: keep generating past end-of-sequence tokens.
        depth_budget: decoder layers that policy ``exit`` may take a token, on average over the output, > 0: a token that would go
            over it stops at the first exit, however unsure that is, and is outside the certificate; None sets no limit.
        cache_salt: requests share cached prefixes only with those of the same salt; give tenants different ones, so that none can
            tell from a fast answer what another has sent. None is a salt of its own.
        use_prefix_cache: False neither takes nor leaves anything in the prefix cache.
        adapter: name of the LoRA adapter that the text is written with, one of `EngineOptions.adapters`; None: the model itself.
        logprobs: how many of the likeliest tokens to report besides the chosen one; 0 reports none.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    thoughts: Thoughts | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    shown_tokens: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int = 0
    depth_budget: float | None = None
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    adapter: str | None = None

    def __post_init__(self) -> None:
        self._store_tuples()
        for name, (allows, allowed) in _CHECKS.items():
            value = getattr(self, name)
            if not ((value is None and name in _MAY_BE_NONE) or allows(value)):
                raise ParamsError(f"{name} is {value!r}; set it to {allowed}.", name)

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature 0)."""
        return self.temperature == 0

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether the model's own argmax is the token: greedy, and nothing changes the logits first."""
        return self.temperature == 0 and not self.changes_logits

    @cached_property
    def penalises_output(self) -> bool:
        """Whether tokens become less or more likely by having been generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def changes_logits(self) -> bool:
        """Whether penalties, biases, a grammar or a budget of thoughts change the logits before a token is chosen."""
        return self.repetition_penalty != 1 or self.penalises_output or bool(self.logit_bias) or self.forces_tokens

    @cached_property
    def forces_tokens(self) -> bool:
        """Whether a grammar or a budget of thoughts says which tokens may come."""
        return self.grammar is not None or (self.thoughts is not None and self.thoughts.budget is not None)

    def _store_tuples(self) -> None:
        """Lists and mappings, as JSON gives them, become tuples, so that equal params stay equal and hashable."""
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        if isinstance(pairs, Iterable):
            object.__setattr__(self, "logit_bias", tuple(tuple(p) if isinstance(p, Iterable) else p for p in pairs))
        for field in ("stop", "shown_tokens", "eos_token_ids"):
            if isinstance(value := getattr(self, field), list):
                object.__setattr__(self, field, tuple(value))


def _is_int(value: object, least: int) -> bool:
    # bool is an int to Python, but top_k=True is a mistake.
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_bias(pair: object) -> bool:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return False
    return _is_int(pair[0], 0) and _is_number(pair[1]) and abs(pair[1]) <= BIAS_LIMIT


def _is_penalty(value: Any) -> bool:
    return _is_number(value) and abs(value) <= PENALTY_LIMIT


def _is_thoughts(value: object) -> bool:
    return isinstance(value, Thoughts) and (value.budget is None or _is_int(value.budget, 1))


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(token, 0) for token in value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


# Field → whether a value is allowed, and which are; checked in this order. Fields whose default is None may be None.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda n: _is_int(n, 1), "an integer >= 1"),
    "top_k": (lambda n: _is_int(n, 0), "an integer >= 0 (0 is off)"),
    "logprobs": (lambda n: _is_int(n, 0), "an integer >= 0 (0 reports none)"),
    "seed": (lambda n: _is_int(n, 0), "an integer >= 0, or None"),
    "temperature": (lambda t: _is_number(t) and t >= 0, "a finite number >= 0 (0 is greedy)"),
    "top_p": (lambda p: _is_number(p) and 0 < p <= 1, "a number in (0, 1] (1 is off)"),
    "min_p": (lambda p: _is_number(p) and 0 <= p <= 1, "a number in [0, 1] (0 is off)"),
    "repetition_penalty": (lambda r: _is_number(r) and r > 0, "a finite number > 0 (1 is off)"),
    "presence_penalty": (_is_penalty, "a number in [-2, 2] (0 is off)"),
    "frequency_penalty": (_is_penalty, "a number in [-2, 2] (0 is off)"),
    "logit_bias": (
        lambda pairs: isinstance(pairs, tuple) and all(map(_is_bias, pairs)),
        "pairs of a token id >= 0 and a bias in [-100, 100], or a mapping of them",
    ),
    "grammar": (lambda g: isinstance(g, Grammar), "a Grammar, such as Grammar.json_schema({…}), or None"),
    "thoughts": (_is_thoughts, "Thoughts with a budget >= 1 or None, or None"),
    "depth_budget": (lambda layers: _is_number(layers) and layers > 0, "a number of layers > 0, or None"),
    "stop": (_are_texts, 'a tuple of non-empty strings, such as ("###",)'),
    "shown_tokens": (_are_token_ids, "a tuple of token ids >= 0"),
    "eos_token_ids": (_are_token_ids, "a tuple of token ids >= 0, or None for the model's"),
    "cache_salt": (lambda salt: isinstance(salt, str), "a string, or None"),
    "adapter": (lambda name: isinstance(name, str), "an adapter's name, or None"),
    "use_prefix_cache": (_is_bool, "True or False"),
    "ignore_eos": (_is_bool, "True or False"),
}
_MAY_BE_NONE = {field.name for field in fields(GenerationParams) if field.default is None}
