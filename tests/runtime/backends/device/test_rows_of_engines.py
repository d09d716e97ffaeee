"""Limit of the batch size by a target's optimization profiles."""

from __future__ import annotations

from dataclasses import replace

from runtime.test_engine import PROMPTS, params, tokens
from tide_runtime import Engine, EngineOptions
from tide_runtime.bundle.engine_info import ProfileInfo


def test_the_batch_size_is_limited_to_that_of_the_engines(engine: Engine) -> None:
    """Guards against steps without an optimization profile, which would fail all 16 prompts of a service."""
    target = replace(engine.manifest.targets["cpu"], profiles=[ProfileInfo("decode", [1, 1, 2], [1, 1, 1])])
    bundle = replace(engine.bundle, manifest=replace(engine.manifest, targets={"cpu": target}))
    alone = [tokens(engine.generate(prompt, params())[0]) for prompt in PROMPTS]
    with Engine(bundle, EngineOptions(policy="full")) as narrow:
        assert [tokens(r) for r in narrow.generate(PROMPTS, params())] == alone
        assert narrow.max_batch == 2
