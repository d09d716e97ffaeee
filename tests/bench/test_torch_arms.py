"""HuggingFace arms: one text whatever runs the step, and steps that a CUDA graph can hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tide_bench.arms.compiled import CompileArm
from tide_bench.arms.cuda_graph import CudaGraphArm, StaticStep
from tide_bench.arms.eager import EagerArm, load_eager
from tide_bench.arms.process import ArmError
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

PROMPTS = [[5, 9, 3, 7], [2, 4, 6, 8]]
STEPS, SLOTS = 6, 16


@pytest.fixture(scope="module")
def eager_tokens(hf_model_directory: Path) -> list[list[int]]:
    timing = EagerArm(hf_model_directory).generate(PROMPTS, 1 + STEPS)
    assert timing.first_token_s > 0 and timing.decode_s > 0
    return timing.tokens


def test_the_compiled_arm_writes_eagers_text(
    hf_model_directory: Path, eager_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The static cache would attend to slots that hold nothing, or to those of the call before."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for setting in ("freezing", "cpp_wrapper", "cpp_wrapper_build_separate"):  # other tests compile in this process
        monkeypatch.setattr(f"torch._inductor.config.{setting}", False)
    arm = CompileArm(hf_model_directory)
    assert [arm.generate(PROMPTS, 1 + STEPS).tokens for _ in range(2)] == [eager_tokens] * 2


def test_the_captured_arm_writes_eagers_text(hf_model_directory: Path, eager_tokens: list[list[int]]) -> None:
    """Breaks: a later call goes on in the token, the place or the cache that the one before left. Steps run uncaptured here."""
    arm = CudaGraphArm(load_eager(hf_model_directory))
    assert [arm.generate(PROMPTS, 1 + STEPS).tokens for _ in range(2)] == [eager_tokens] * 2


@torch.no_grad()
def test_a_recorded_step_replayed_writes_eagers_text(hf_model_directory: Path, eager_tokens: list[list[int]]) -> None:
    """A position that Python computes would be frozen when a CUDA graph is captured: every replay would write the same slot."""
    model: Any = load_eager(hf_model_directory)
    cache = StaticCache(config=model.config, max_cache_len=SLOTS)
    ids = torch.tensor(PROMPTS)
    model(input_ids=ids, past_key_values=cache)
    step = StaticStep(model, cache, len(PROMPTS), SLOTS, "cpu")
    recorded = make_fx(step)()  # its operators with what Python computed as constants, as a capture has them
    cache.reset()
    first = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    step.begin(first, ids.shape[1])
    for _ in range(STEPS):
        recorded()
    assert torch.cat([first, step.written(STEPS)], 1).tolist() == eager_tokens


@torch.no_grad()
def test_a_step_touches_no_memory_but_its_devices(hf_model_directory: Path) -> None:
    """A capture would end with an error, which no machine without a GPU shows: device `meta` mixes with no other one, and has no
    values that Python could read."""
    config = AutoConfig.from_pretrained(hf_model_directory)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).eval()
    cache = StaticCache(config=config, max_cache_len=SLOTS)
    model(input_ids=torch.zeros(2, 4, dtype=torch.int64, device="meta"), past_key_values=cache)
    step = StaticStep(model, cache, 2, SLOTS, "meta")
    step()
    assert step.written(1).shape == (2, 1)


def test_models_whose_cache_counts_in_python_are_refused() -> None:
    """A sliding window would stand still in a graph: another text, or none that anyone compares."""
    layers = type("Cache", (), {"is_sliding": [False, True]})()
    with pytest.raises(ArmError, match="sliding windows"):
        StaticStep(None, layers, 1, SLOTS, "cpu")
