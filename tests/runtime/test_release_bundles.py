"""Bundles that earlier releases wrote still load, and generate the tokens that those releases generated.

`tests/release_bundles/make.py` writes the bundles and their expected.json at a release. A failure here means that users would
have to export their models again: change the runtime so that it reads the bundles, and leave the bundles as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions, TideError
from tide_runtime.bundle import Bundle

RELEASES = Path(__file__).parents[1] / "release_bundles"
EXPECTED = {file.parent: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RELEASES.glob("*/expected.json"))}
BUNDLES = {
    f"{release.name}/{name}": (release / name, bundle)
    for release, expected in EXPECTED.items()
    for name, bundle in expected["bundles"].items()
}


def each_bundle(wanted: Callable[[dict[str, Any]], Any]) -> pytest.MarkDecorator:
    """A test's arguments ``folder`` and ``bundle``, for every bundle that is ``wanted``."""
    params = [pytest.param(*BUNDLES[name], id=name) for name in BUNDLES if wanted(BUNDLES[name][1])]
    return pytest.mark.parametrize(("folder", "bundle"), params)


def each_case() -> pytest.MarkDecorator:
    """A test's arguments ``folder``, ``prompts`` and ``case``, for every policy that a bundle was run with."""
    params = [
        pytest.param(folder, bundle["prompts"], case, id="-".join([name, case["policy"], *case["depth"]]))
        for name, (folder, bundle) in BUNDLES.items()
        for case in bundle["cases"]
    ]
    return pytest.mark.parametrize(("folder", "prompts", "case"), params)


def load(folder: Path, policy: str, **depth: Any) -> Engine:
    """The bundle on the processor, its files compared with their SHA-256. ``depth``: options of the policy."""
    options = EngineOptions(target="cpu", policy=policy, threads=ThreadOptions(1), verify=True, max_batch=3)
    return Engine.load(folder, replace(options, depth=replace(options.depth, **depth)))


def test_every_bundle_is_tested():
    """A bundle without expected tokens would be loaded by no test."""
    assert EXPECTED
    for release, expected in EXPECTED.items():
        assert {path.name for path in release.iterdir() if path.is_dir()} == set(expected["bundles"])


@each_case()
def test_tokens(folder, prompts, case):
    """A bundle on a device would be refused after an upgrade, or continue its prompts in another way."""
    params = GenerationParams(max_new_tokens=len(case["tokens"][0]), ignore_eos=True)
    with load(folder, case["policy"], **case["depth"]) as engine:
        together = [list(generation.token_ids) for generation in engine.generate(prompts, params)]
        alone = [list(engine.generate(prompt, params)[0].token_ids) for prompt in prompts]
    assert together == case["tokens"]
    assert alone == case["tokens"]


@each_bundle(lambda bundle: "chat" in bundle)
def test_chat(folder, bundle):
    """The tokenizer or the chat template would be read differently: the model would see another prompt."""
    chat = bundle["chat"]
    with load(folder, "full") as engine:
        prompt = engine.chat_prompt(chat["messages"])
        answer = engine.generate(prompt, GenerationParams(max_new_tokens=chat["max_new_tokens"], ignore_eos=True))[0]
    assert prompt == chat["prompt"]
    assert answer.text == chat["text"]


@each_bundle(lambda bundle: not bundle["cases"] and not bundle["without_engines"])
def test_a_bundle_without_the_processor_as_target_opens(folder, bundle):
    """A bundle for GPUs would be called broken; whether its graphs run shows on a GPU only."""
    assert "cpu" not in Bundle.open(folder, verify=True).manifest.targets


@each_bundle(lambda bundle: bundle["without_engines"])
def test_a_manifest_with_engines_is_read(folder, bundle):
    """A manifest that describes engines would be called invalid. The engines, which take megabytes, are not in the folder; that
    is found only after the whole manifest has been read and checked."""
    with pytest.raises(TideError, match=r"engines/.* is missing from the bundle"):
        Bundle.open(folder)
