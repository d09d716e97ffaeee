"""The sampling that a model's authors advise, in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export.architectures import tiny_model
from tide_runtime.bundle.manifest import GenerationInfo
from transformers import GenerationConfig

from tide_export.export import generation_info
from tide_export.load import load_model

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
    assert info == GenerationInfo([3, 5], **(ADVICE if do_sample else {}))
