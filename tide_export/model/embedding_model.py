"""Embedding models: what sentence-transformers' files beside the weights say, and the model without its LM head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import ModelFilesError, ParamsError, UnsupportedModelError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import cached_file

from tide_export.config import ExportConfig

_MODULES = "modules.json"
_POOLINGS = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {  # of files before sentence-transformers 5.4 → pooling_mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_embedding(source: str, revision: str | None, config: PreTrainedConfig) -> EmbeddingInfo | None:
    """How the model of ``source``, a directory or hub id, embeds texts; None where it has none of sentence-transformers' files.

    Raises UnsupportedModelError for what is not compiled: other modules and poolings, attention to later tokens.
    """
    modules = _read(source, _MODULES, revision)
    if modules is None:
        return None
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _unsupported(source, f"{_MODULES} lists {', '.join(kinds)}", "Transformer, Pooling and perhaps Normalize")
    text = config.get_text_config()
    if getattr(text, "is_causal", None) is False or getattr(text, "use_bidirectional_attention", False):
        raise _unsupported(source, "its config.json says that tokens attend to later ones", "causal decoders")
    settings = _read(source, "sentence_bert_config.json", revision) or {}
    if settings.get("do_lower_case"):
        raise _unsupported(source, "sentence_bert_config.json says do_lower_case", "text as it is")
    prompts = _read(source, "config_sentence_transformers.json", revision) or {}
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    sizes = getattr(text, "matryoshka_dimensions", None)
    matryoshka = sizes or getattr(text, "is_matryoshka", False)
    pooling = _pooling(source, _read(source, f"{modules[1].get('path')}/config.json", revision) or {}, prompt)
    return EmbeddingInfo(pooling, "Normalize" in kinds, prompt, list(sizes or []) if matryoshka else None)


def give_states(model: PreTrainedModel) -> str:
    """Take the LM head out of ``model``: its logits become its final states [B, S, H], without what it does to logits.

    Returns the name of the head. Raises UnsupportedModelError where the model is not a base model and a head.
    """
    head = model.get_output_embeddings()
    base = model.base_model
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None or base is model:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported as an embedding model: it has no head to leave out")
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Identity())

    @wraps(base.forward)
    def forward(*args: Any, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=base(*args, **kwargs).last_hidden_state)

    model.forward = forward
    return name


def check_options_of_embedding(config: ExportConfig) -> None:
    """Raise ParamsError for options that have no meaning for an embedding model."""
    given = {
        "--calibration": config.calibration,
        "--draft-head": config.draft_head,
        "--quantizer gptq_mixed": config.quantizer == "gptq_mixed",
    }
    if names := [name for name, value in given.items() if value]:
        raise ParamsError(f"{' and '.join(names)}: an embedding model runs whole and predicts no token; leave that out")


def _pooling(source: str, settings: Mapping[str, Any], prompt: str) -> str:
    flagged = [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    modes = settings.get("pooling_mode", flagged or ["mean"])
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise _unsupported(source, f"it pools by {' and '.join(map(str, modes))}", " or ".join(_POOLINGS))
    if modes == ["mean"] and settings.get("include_prompt") is False:
        raise _unsupported(source, "its mean leaves out the tokens of the prompt (include_prompt)", "the mean of all tokens")
    return _POOLINGS[modes[0]]


def _read(source: str, name: str, revision: str | None) -> Any:
    """A JSON file beside the weights; None where there is none."""
    file = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{file} is not JSON ({error}); download it again") from error


def _unsupported(source: str, found: str, taken: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{source} is an embedding model that is not supported: {found}, and TIDE compiles {taken}")
