"""A model in the shape of the demo's with random weights: the predictions of its early layers are all wrong."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.in_process import run_in_process

from benchmarks.models.demo import DEMO_MODELS

_CONFIG = DEMO_MODELS / "layerskip" / "config.json"


def random_identity() -> str:
    """Changes when its weights do."""
    return files_digest([_CONFIG, Path(__file__)]) + f" torch {version('torch')}"


def random_twin(cache: Path) -> Path:
    """The HuggingFace folder of the model."""
    return cached_folder(cache / "random" / "weights", random_identity(), lambda f: run_in_process(_write, f))


def _write(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(_CONFIG.parent), dtype=torch.float32).save_pretrained(folder)
