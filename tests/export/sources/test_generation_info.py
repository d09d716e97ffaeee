"""The sampling that a model's authors advise, in the manifest."""

from pathlib import Path
from typing import Any

import pytest
from export.architectures import VOCAB, tiny_model
from tide_runtime.bundle.manifest import GenerationInfo
from transformers import GenerationConfig

from tide_export.load import load_model
from tide_export.sources.generation_defaults import generation_info, generation_note
from tide_export.sources.loaded_model import LoadedModel

ADVICE: dict[str, Any] = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}


@pytest.mark.parametrize("do_sample", [True, False])
def test_advised_sampling_of_a_checkpoint(do_sample: bool, tmp_path: Path) -> None:
    """Breaks: the model samples otherwise than with transformers, or samples where its generation_config.json says greedy."""
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[3, 5], do_sample=True, **ADVICE)
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(file.read_text().replace('"do_sample": true', f'"do_sample": {str(do_sample).lower()}'))
    info = generation_info(load_model(str(tmp_path), "fp32", tokenizer="none"))
    assert info == GenerationInfo([3, 5], **(ADVICE if do_sample else {"repetition_penalty": 1.5}))


@pytest.mark.parametrize(
    ("settings", "suppressed", "noted"),
    [
        ({}, [], None),
        ({"no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0}, [], None),
        ({"suppress_tokens": [7, 4]}, [4, 7], None),
        ({"bad_words_ids": [[9], [4]]}, [4, 9], None),
        ({"bad_words_ids": [[9], [2], [4]], "eos_token_id": [2, 3]}, [4, 9], None),
        ({"suppress_tokens": [-1, 7, VOCAB]}, [7], None),
        ({"bad_words_ids": [[9], [4, 5]]}, [9], "bad_words_ids of several tokens (no text has them one after the other)"),
        (
            {"no_repeat_ngram_size": 3, "forced_eos_token_id": 0},
            [],
            "no_repeat_ngram_size (no sequence of so many tokens is written twice), "
            "forced_eos_token_id (a text that reaches its limit ends with it)",
        ),
        ({"typical_p": 0.9}, [], None),
        ({"do_sample": True, "typical_p": 0.9}, [], "typical_p (tokens far from the expected surprise are not drawn)"),
    ],
)
def test_what_changes_a_text_is_applied_or_named(settings: dict[str, Any], suppressed: list[int], noted: str | None) -> None:
    """Breaks: the model writes other texts than with transformers, and nothing says why."""
    model = tiny_model("llama", layers=1)
    model.generation_config = GenerationConfig(**settings)
    loaded = LoadedModel(model, None, "llama")
    note = generation_note(loaded)
    assert generation_info(loaded).suppress_tokens == suppressed
    assert note is None if noted is None else note is not None and f"sets {noted}, which TIDE does not apply" in note
