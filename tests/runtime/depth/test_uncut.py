"""All segments as one graph: what goes through every layer takes it, nothing else does, and a target may lack it."""

from pathlib import Path

import pytest
from edited_bundle import edit
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import UNCUT
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.errors import BundleError

PARAMS = GenerationParams(max_new_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12]]


def load_copy(directory: Path) -> Engine:
    return Engine.load(directory, EngineOptions(threads=ThreadOptions(1)))


def without_uncut(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "graphs", UNCUT, remove=True)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one row", "three rows"])
def test_it_is_the_segments(engine: Engine, bundle_copy: Path, prompts: list[list[int]]) -> None:
    """`full` would be another model than the one that the exits were calibrated for and drafts are verified with."""
    without_uncut(bundle_copy)
    with load_copy(bundle_copy) as segmented:
        expected, results = segmented.generate(prompts, PARAMS), engine.generate(prompts, PARAMS)
        assert set(segmented.backend.launches) == {segment.name for segment in engine.manifest.segments}
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    for result, wanted in zip(results, expected, strict=True):
        assert [t.logprob for t in result.logprobs] == pytest.approx([t.logprob for t in wanted.logprobs], abs=1e-4)


def test_another_models_graph_in_its_place_is_refused(bundle_copy: Path) -> None:
    """A segment under its name has the right kinds of inputs: the text would come from a third of the layers."""
    edit(bundle_copy, "targets", "cpu", "graphs", UNCUT, value="onnx/cpu.segment_0.onnx")
    with pytest.raises(BundleError, match=r"that uncut needs.*export the bundle again"):
        load_copy(bundle_copy)


def test_only_tokens_that_stop_nowhere_take_it() -> None:
    """A token that waits at a boundary has its shallow layers' keys already: computing them again would cost what it saved."""
    model = TinyTransformer(3, (0.5,) * 6, 31, 64)
    manifest = tiny_manifest(model, (2, 4), [ExitInfo(2, "identity", "max_probability", 0.5, 0.5, 0.5)])
    backend, executor, launched = NumpyBackend(manifest, model), Executor(manifest), list[str]()
    context = backend.context(2)
    context.every_layer = ["all of them"]
    rows = [make_row(Request((1, 2, 3), GenerationParams(max_new_tokens=4), seat), manifest) for seat in range(2)]
    for slot, row in enumerate(rows):
        row.batch_index = slot
    states = [LazySequence(row, executor.frontier(context, row, 4)) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.numpy_backend.NumpyStep.run", lambda step, graph: launched.append(graph))
        executor.advance(context, states, [0], 0, 1)
        executor.advance(context, states, [0], 1, 3)
        assert launched == ["segment_0", "segment_1", "segment_2"]
        executor.advance(context, states, [1], 0, 3)
    assert launched[3:] == ["all of them"]
