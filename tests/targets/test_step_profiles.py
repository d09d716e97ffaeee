"""Optimization profiles in sequences and tokens; an engine refuses steps outside of them."""

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime import EngineOptions
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.scheduling.budgets import MAX_CHUNK

from tide_export.config import ExportConfig
from tide_export.targets.engines import step_profiles


@pytest.mark.parametrize(
    "drafts, slots, decode, prefill",
    [
        (0, 4096, [1, 1, 13], [1, 512, 512]),
        (6, 4096, [1, 1, 13], [1, 512, 512]),
        (20, 4096, [1, 1, 21], [1, 512, 512]),
        (20, 64, [1, 1, 21], [1, 64, 64]),
        (20, 8, [1, 1, 8], [1, 8, 8]),
    ],
)
def test_rows_and_tokens(drafts, slots, decode, prefill):
    """Decoding would be tuned for prompts, drafts have no engine that takes them, or a step be longer than the cache."""
    made = step_profiles(max_batch=4, draft_limit=drafts, max_seq_len=slots)
    assert [(p.name, p.rows, p.tokens) for p in made] == [("decode", [1, 1, 4], decode), ("prefill", [1, 1, 4], prefill)]


def test_shapes():
    """TensorRT would be given shapes that no step has, or too few places for the tokens that want logits."""
    decode, prefill = step_profiles(max_batch=4, draft_limit=0, max_seq_len=64)
    assert [decode.shape(["batch", 2, "seq"], which) for which in range(3)] == [(1, 2, 1), (1, 2, 1), (4, 2, 13)]
    assert [prefill.shape(["wanted"], which) for which in range(3)] == [(1,), (64,), (256,)]


def test_the_runtimes_own_steps_fit():
    """A bundle made and loaded with nothing but defaults would end in "no profile for 16 rows of 512 tokens"."""
    engine, config = EngineOptions(), ExportConfig()
    exact = ExactDepth(tiny_manifest(TinyTransformer(0, (1.0, 1.0), 5, 8), [1]), DepthOptions())
    decode, prefill = step_profiles(config.max_batch, 0, 4096)
    assert prefill.takes(engine.max_batch, MAX_CHUNK)
    assert decode.takes(engine.max_batch, exact.lookahead)
