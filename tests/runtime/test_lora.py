"""Reading adapters as PEFT saves them: what they hold beside pairs of matrices is refused by name, never left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tide_runtime.errors import AdapterError
from tide_runtime.lora import CONFIG, TENSORS, LoraAdapter

Q = "model.layers.0.self_attn.q_proj"
CONFIGURED = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "use_dora": False}


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **settings: Any) -> Path:
    """An adapter of rank 4 on `Q` [6, 5], whose matrices are ones."""
    pair = {f"base_model.model.{Q}.lora_A.weight": np.ones((4, 5)), f"base_model.model.{Q}.lora_B.weight": np.ones((6, 4))}
    save_file({key: value.astype(np.float32) for key, value in (pair if tensors is None else tensors).items()}, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({**CONFIGURED, **settings}))
    return folder


def scale(folder: Path) -> float:
    pair = LoraAdapter.read("a", folder).modules[Q]
    assert pair.down.shape == (4, 5) and pair.up.shape == (6, 4)
    return float(pair.up[0, 0])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 4}}, 1.0),
        ({"alpha_pattern": {"proj": 4}}, 2.0),  # no whole part of the path
        ({"alpha_pattern": {"^model.layers.0.*": 2}, "rank_pattern": {"q_proj": 4}, "r": 16}, 0.5),
    ],
)
def test_scale(tmp_path: Path, settings: dict[str, Any], wanted: float) -> None:
    """Breaks: an adapter that answers too strongly or too weakly."""
    assert scale(write(tmp_path, **settings)) == wanted


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"made_in_a_later_release": 1}, "made_in_a_later_release"),
        ({"peft_type": "VERA"}, "VERA"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_settings_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    """Breaks: an adapter that answers as another one than was trained."""
    with pytest.raises(AdapterError, match=named):
        LoraAdapter.read("a", write(tmp_path, **settings))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({f"base_model.model.{Q}.lora_magnitude_vector": np.ones(4)}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9))}, "lora_embedding_A"),
        ({f"base_model.model.{Q}.lora_A.weight": np.ones((4, 5))}, "q_proj"),
        ({f"base_model.model.{Q}.lora_{k}.weight": np.ones(s) for k, s in (("A", (4, 5)), ("B", (6, 3)))}, "q_proj"),
        ({f"base_model.model.{Q}.lora_{k}.weight": np.full((4, 4), np.nan) for k in "AB"}, "NaN"),
        ({}, "no matrices"),
    ],
)
def test_tensors_refused(tmp_path: Path, tensors: dict[str, np.ndarray], named: str) -> None:
    """Breaks: tensors that are left out without a word."""
    with pytest.raises(AdapterError, match=named):
        LoraAdapter.read("a", write(tmp_path, tensors))


def test_files_refused(tmp_path: Path) -> None:
    """Breaks: a traceback where a folder is another than was meant."""
    with pytest.raises(AdapterError, match=CONFIG):
        LoraAdapter.read("a", tmp_path)
    write(tmp_path)
    (tmp_path / TENSORS).write_bytes(b"{}")
    with pytest.raises(AdapterError, match=TENSORS):
        LoraAdapter.read("a", tmp_path)
    (tmp_path / CONFIG).write_text("[")
    with pytest.raises(AdapterError, match=CONFIG):
        LoraAdapter.read("a", tmp_path)


def test_digest_follows_content(tmp_path: Path) -> None:
    """Breaks: keys and values of a text under another adapter of the same name."""
    first = LoraAdapter.read("a", write(tmp_path)).digest
    assert LoraAdapter.read("b", tmp_path).digest == first != LoraAdapter.read("a", write(tmp_path, lora_alpha=4)).digest
