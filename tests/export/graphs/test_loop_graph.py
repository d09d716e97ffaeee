"""The graph of one loop, whose rows are at any loop: checked against the model, and what policy `exact` runs with it."""

from dataclasses import replace
from pathlib import Path

import pytest
from export.looped_tiny import FORMS, made, nanbeige
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import LOOP
from tide_runtime.depth.options import DepthOptions

from tide_export import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.check_results import Check, GraphCheck

OPTIONS = EngineOptions(policy="exact", max_batch=3, threads=ThreadOptions(1), depth=DepthOptions(draft="router"))
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [3]]
LAYERS, LOOPS = 2, FORMS["nanbeige"][1]
Bundle = tuple[Path, list[Check]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model without a norm between its loops, and the checks of its export."""
    folder = tmp_path_factory.mktemp("looped")
    model = made(nanbeige(num_hidden_layers=LAYERS, skip_loop_final_norm=True))
    config = ExportConfig(max_seq_len=64, targets=("cpu",), checkpoints="none")
    return folder, write_bundle(LoadedModel(model, None, "looped"), folder, config, ExportProgress(quiet=True))[1]


def test_the_graph_is_verified_in_each_loop(bundle: Bundle) -> None:
    """A graph that begins a loop with the wrong state would give wrong drafts and wrong texts."""
    found = [check for check in bundle[1] if isinstance(check, GraphCheck) and check.graph == LOOP]
    assert [check.layers for check in found] == [(n * LAYERS, (n + 1) * LAYERS) for n in range(LOOPS)]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}])
def test_texts_are_those_of_full_depth_in_fewer_passes(bundle: Bundle, params: dict[str, float]) -> None:
    """Tokens would wait for one another although nothing of them is needed, or get keys of another loop."""
    asked = GenerationParams(max_new_tokens=24, ignore_eos=True, **params)  # type: ignore[arg-type]
    with Engine.load(bundle[0], OPTIONS) as rows, rows.with_options(replace(OPTIONS, policy="full")) as full:
        for prompts in (PROMPTS[:1], PROMPTS):
            plain = [one.token_ids for one in full.generate(prompts, asked)]
            before = dict(rows.backend.launches)
            found = rows.generate(prompts, asked)
            assert [one.token_ids for one in found] == plain
            assert sum(one.stats.accepted.get("loop", 0) for one in found)
            passes = rows.backend.launches["segment_0"] - before.get("segment_0", 0)
            assert passes == len(prompts), "tokens are decoded by the graph of all loops"


def test_a_prompt_that_joins_between_others(bundle: Bundle) -> None:
    """The others' launch, which spans the row of a prompt that is just being computed, would write over its first keys."""
    lengths = (24, 4, 24, 20)  # the last one takes the second's row
    with Engine.load(bundle[0], OPTIONS) as engine:
        asked = [GenerationParams(max_new_tokens=count, ignore_eos=True) for count in lengths]
        prompts = [*PROMPTS, [9, 4, 7, 7, 2, 6]]
        alone = [engine.generate([ids], own)[0].token_ids for ids, own in zip(prompts, asked, strict=True)]
        handles = [engine.submit(ids, own) for ids, own in zip(prompts, asked, strict=True)]
        assert [handle.result().token_ids for handle in handles] == alone
