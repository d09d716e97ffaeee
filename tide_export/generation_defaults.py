"""Where a model's texts end and how its authors advise to choose tokens, from its generation config."""

from __future__ import annotations

from typing import Any

from tide_runtime.bundle.manifest import GenerationInfo
from transformers import GenerationConfig

from tide_export.load import LoadedModel

# Settings of transformers that change a text and have no counterpart in the runtime → the values that change nothing. Those of
# the second list count where tokens are drawn.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "forced_bos_token_id": (), "forced_eos_token_id": (), "begin_suppress_tokens": ([],),
    "min_length": (0,), "min_new_tokens": (0,), "sequence_bias": ({},), "exponential_decay_length_penalty": (), "num_beams": (1,),
    "guidance_scale": (1.0,), "encoder_repetition_penalty": (1.0,), "stop_strings": ([],), "watermarking_config": (),
}  # fmt: skip
_NOT_APPLIED_TO_DRAWS = {"typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": ()}


def generation_info(loaded: LoadedModel) -> GenerationInfo:
    """What the manifest says of them; those that it has no place for are in `generation_note`."""
    config = loaded.model.generation_config
    if config is None:
        return GenerationInfo([])
    eos = config.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    always = {"repetition_penalty": config.repetition_penalty or 1.0, "suppress_tokens": _suppressed(config)}
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
    names = _NOT_APPLIED | (_NOT_APPLIED_TO_DRAWS if config.do_sample else {})
    ignored = [name for name, idle in names.items() if (value := getattr(config, name, None)) is not None and value not in idle]
    ignored += ["bad_words_ids of several tokens"] if any(len(word) > 1 for word in config.bad_words_ids or ()) else []
    if not ignored:
        return None
    return (
        f"the model's generation config sets {', '.join(ignored)}, which TIDE does not apply: transformers may write other texts"
    )


def _suppressed(config: GenerationConfig) -> list[int]:
    """Tokens that are never written, those of ``bad_words_ids`` with words of one token included."""
    words = [word[0] for word in config.bad_words_ids or () if len(word) == 1]
    return sorted({*(config.suppress_tokens or ()), *words})
