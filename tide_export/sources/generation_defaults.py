"""Where a model's texts end and how its authors advise to choose tokens, from its generation config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tide_runtime.bundle.manifest import GenerationInfo
from transformers import GenerationConfig

from tide_export.sources.loaded_model import LoadedModel

# Settings of transformers that change a text and have no counterpart in the runtime → the values that change nothing, and what
# others do. Those of the second list count where tokens are drawn.
_NOT_APPLIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no_repeat_ngram_size": ((0,), "no sequence of so many tokens is written twice"),
    "encoder_no_repeat_ngram_size": ((0,), "no sequence of so many tokens of the prompt is written"),
    "forced_bos_token_id": ((), "an answer to a prompt of one token begins with it"),
    "forced_eos_token_id": ((), "a text that reaches its limit ends with it"),
    "begin_suppress_tokens": (([],), "no answer begins with them"),
    "min_length": ((0,), "prompt and answer have so many tokens at least"),
    "min_new_tokens": ((0,), "an answer has so many tokens at least"),
    "sequence_bias": (({},), "sequences of tokens are more or less likely"),
    "exponential_decay_length_penalty": ((), "the end becomes likelier with the length"),
    "num_beams": ((1,), "the likeliest of several texts is taken"),
    "guidance_scale": ((1.0,), "the logits without the prompt count too"),
    "encoder_repetition_penalty": ((1.0,), "tokens of the prompt are more or less likely"),
    "stop_strings": (([],), "they end a text"),
    "watermarking_config": ((), "texts are watermarked"),
}
_NOT_APPLIED_TO_DRAWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "typical_p": ((1.0,), "tokens far from the expected surprise are not drawn"),
    "epsilon_cutoff": ((0.0,), "tokens below a probability are not drawn"),
    "eta_cutoff": ((0.0,), "tokens below a probability that depends on the entropy are not drawn"),
    "top_h": ((), "the tokens drawn from have a limited entropy"),
}


def generation_info(loaded: LoadedModel) -> GenerationInfo:
    """What the manifest says of them; those that it has no place for are in `generation_note`."""
    config = loaded.model.generation_config
    if config is None:
        return GenerationInfo([])
    eos = config.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    never = [token for token in _suppressed(config, ids) if 0 <= token < vocabulary]
    always = {"repetition_penalty": config.repetition_penalty or 1.0, "suppress_tokens": never}
    if not config.do_sample:
        return GenerationInfo(ids, **always)
    return GenerationInfo(
        ids,
        temperature=config.temperature if config.temperature is not None else 1.0,
        top_k=config.top_k or 0,
        top_p=config.top_p if config.top_p is not None else 1.0,
        min_p=config.min_p or 0.0,
        **always,
    )


def generation_note(loaded: LoadedModel) -> str | None:
    """A sentence on the settings that the runtime does not apply; None where there are none."""
    config = loaded.model.generation_config
    if config is None:
        return None
    settings = _NOT_APPLIED | (_NOT_APPLIED_TO_DRAWS if config.do_sample else {})
    ignored = [
        f"{name} ({effect})"
        for name, (idle, effect) in settings.items()
        if (value := getattr(config, name, None)) is not None and value not in idle
    ]
    if any(len(word) > 1 for word in config.bad_words_ids or ()):
        ignored.append("bad_words_ids of several tokens (no text has them one after the other)")
    if not ignored:
        return None
    return (
        f"the model's generation config sets {', '.join(ignored)}, which TIDE does not apply: transformers may write other texts"
    )


def _suppressed(config: GenerationConfig, ends: Sequence[int]) -> list[int]:
    """Tokens that are never written, those of ``bad_words_ids`` with words of one token included, but for ``ends`` of a text."""
    words = {word[0] for word in config.bad_words_ids or () if len(word) == 1} - {*ends}
    return sorted({*(config.suppress_tokens or ()), *words})
