"""How many rows a target takes at once, and what an `Engine` makes of it."""

from __future__ import annotations

from dataclasses import replace

from runtime.test_engine import PROMPTS, params, tokens
from tide_runtime import Engine, EngineOptions
from tide_runtime.bundle.engine_info import ProfileInfo


def test_no_more_rows_at_once_than_engines_were_built_for(engine: Engine) -> None:
    """Such a step has no optimization profile, and a service that sends 16 prompts would get an error for all of them."""
    target = replace(engine.manifest.targets["cpu"], profiles=[ProfileInfo("decode", [1, 1, 2], [1, 1, 1])])
    bundle = replace(engine.bundle, manifest=replace(engine.manifest, targets={"cpu": target}))
    alone = [tokens(engine.generate(prompt, params())[0]) for prompt in PROMPTS]
    with Engine(bundle, EngineOptions(policy="full")) as narrow:
        assert [tokens(r) for r in narrow.generate(PROMPTS, params())] == alone
        assert narrow._idle[0].capacity == 2
