"""A random Ouro-1.4B as a HuggingFace folder in bf16, and its export to 4 bits: time, memory, and what loops add on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_bench.build_cache import run_in_process

from benchmarks.export_scale import measure

if TYPE_CHECKING:
    import torch

_CONFIG = "config.json"
_OPTIONS = ("--weights", "int4", "--max-seq-len", "2048", "--tokenizer", "none")  # of tide-export


@dataclass(frozen=True)
class OuroShape:
    """Sizes of an Ouro model; as many key heads as query heads, an untied head."""

    layers: int
    hidden: int
    heads: int
    mlp: int
    vocabulary: int
    loops: int = 4


OURO_1B = OuroShape(24, 2048, 16, 5632, 49152)


def export_rows(shape: OuroShape, folder: Path) -> list[dict[str, Any]]:
    """A row for all loops and one for a single loop, which has the same weights once; everything is deleted again."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        run_in_process(write_ouro, shape, place / "ouro")
        for loops in (shape.loops, 1):
            source = place / "ouro" if loops == shape.loops else with_loops(place / "ouro", loops, place / "one_loop")
            found = measure(source, place / f"bundle_{loops}", _OPTIONS)
            rows.append({"loops": loops, **vars(found)})
    return rows


def write_ouro(shape: OuroShape, folder: Path) -> None:
    """Seeded weights, a file for each layer and one for the rest, so that memory holds one layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from tide_export.looped_models import OuroConfig

    config = OuroConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        total_ut_steps=shape.loops,
        architectures=["OuroForCausalLM"],
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for number, names in enumerate(_by_layer(name for name, _ in model.named_parameters())):
        tensors = {name: _random(model.get_parameter(name).shape) for name in names}
        index |= dict.fromkeys(names, file := f"model-{number:05}.safetensors")
        save_file(tensors, folder / file, metadata={"format": "pt"})
    listing = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing), encoding="utf-8")


def with_loops(folder: Path, loops: int, out: Path) -> Path:
    """``out``: the weights of ``folder``, on the same disk, under a config with another number of loops."""
    out.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name != _CONFIG:
            os.link(file, out / file.name)
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    (out / _CONFIG).write_text(json.dumps(config | {"total_ut_steps": loops}), encoding="utf-8")
    return out


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Names of one layer together, those outside the layers too."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.split(".")[2] if name.startswith("model.layers.") else "", []).append(name)
    return list(groups.values())


def _random(shape: torch.Size) -> torch.Tensor:
    """A norm's gain, or a matrix of Llama's initial deviation."""
    import torch

    tensor = torch.ones(shape, dtype=torch.bfloat16)
    return tensor if len(shape) == 1 else tensor.normal_(0, 0.02)
