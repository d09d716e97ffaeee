"""Where a checkpoint says how it was quantised: in config.json, or in the file that its quantizer's first releases wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tide_runtime.errors import ModelFilesError
from transformers import PreTrainedConfig
from transformers.utils import cached_file

# AutoGPTQ and GPTQModel, AutoAWQ, ModelOpt; in the order in which other loaders look for them.
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# AutoAWQ's first names of the bits, the group size and the layout.
_AWQ_FIELDS = ("w_bit", "q_group_size", "zero_point")


def find_settings(source: str, config: PreTrainedConfig, revision: str | None) -> None:
    """Set ``config.quantization_config`` where the settings are elsewhere. Raises ModelFilesError if a file is no JSON object."""
    if getattr(config, "quantization_config", None) is not None:
        return
    compression = getattr(config, "compression_config", None)
    inner = getattr(config.get_text_config(), "quantization_config", None)
    settings = inner or (compression and {"quant_method": "compressed-tensors", **compression})
    for name in _FILES if settings is None else ():
        file = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            settings = _read(Path(file))
            break
    if settings is not None:
        config.quantization_config = settings


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{file.name} is no JSON file ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise ModelFilesError(f"{file.name} holds no JSON object; download it again")
    if file.name == "hf_quant_config.json":
        method = "modelopt"
    else:
        method = "awq" if any(key in settings for key in _AWQ_FIELDS) or file.name == "quant_config.json" else "gptq"
    return {"quant_method": method, **settings}
