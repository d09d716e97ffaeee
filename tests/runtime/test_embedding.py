"""`Engine.embed`: texts of an embedding model, of any lengths, in company and in chunks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edited_bundle import edit, manifest_of
from export.tiny_embedding import CONFIG, POOLINGS, embedded, ids_of, write_embedding_model
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.cli.inspect import inspect
from tide_runtime.errors import EngineClosedError, ParamsError, PromptError
from tide_runtime.scheduling.scheduler import Scheduler
from transformers import PreTrainedModel

from tide_export import export

TEXTS = ["def add(a, b):", "a", "The quick brown fox jumps over the lazy dog.", "x = 1", ""]
Made = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """``made("mean")``: a model of that pooling, trained for vectors of 16 and 32 numbers, and its bundle; ``changes``: of the
    manifest's `EmbeddingInfo`."""
    folder = tmp_path_factory.mktemp("embedding")
    model = write_embedding_model(folder / "model", pooling=POOLINGS["last"], matryoshka_dimensions=[16, 32])
    export(str(folder / "model"), folder / "bundle", CONFIG)

    def make(pooling: str, **changes: object) -> Made:
        copy = Path(shutil.copytree(folder / "bundle", tmp_path_factory.mktemp(pooling), dirs_exist_ok=True))
        edit(copy, "embedding", value={**manifest_of(copy)["embedding"], "pooling": pooling, **changes})
        return model, copy

    return make


def load(made: Made, **options: object) -> Engine:
    return Engine.load(made[1], EngineOptions(threads=ThreadOptions(1), **options))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(made: Callable[..., Made], pooling: str) -> None:
    """Searches would compare vectors that are not the model's: of another token, of padding, or of another text of the call."""
    model, _ = made(pooling)
    with load(made(pooling)) as engine:
        found = engine.embed(TEXTS)
        assert found.dtype == np.float32 and found.shape == (5, 64)
        np.testing.assert_allclose(found, embedded(model, [ids_of(text) for text in TEXTS], pooling), atol=1e-5)
        assert np.array_equal(engine.embed([ids_of(text) for text in TEXTS]), found)
        assert np.array_equal(engine.embed(ids_of("a")), found[1:2])
        assert engine.stats().prefix_bytes == 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_company_and_chunks_change_no_bit(made: Callable[..., Made], pooling: str) -> None:
    """The vector of a document would not be found again after an index is built in other batches."""
    with load(made(pooling)) as engine:
        if engine.row_padding is None:
            pytest.skip("this machine's kernels round otherwise where tokens share a launch")
        together = engine.embed(TEXTS)
        alone = np.concatenate([engine.embed(text) for text in TEXTS])
    with load(made(pooling), prefill_chunk=3, max_batch=2) as engine:
        in_chunks = engine.embed(TEXTS)
        handles = [engine.submit_embedding(text) for text in TEXTS]
        submitted = np.stack([handle.result() for handle in handles])
    for found in (alone, in_chunks, submitted):
        assert np.array_equal(found, together)


def test_a_text_that_runs_again_is_pooled_once(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, the beginning of a preempted text would count twice in its mean."""
    extend, left = Scheduler._extend, [2]

    def preempting(scheduler: Scheduler, plan: object) -> int:
        if left[0] and scheduler.running and scheduler.running[0].sequence.num_cached_tokens > 0:
            left[0] -= 1
            scheduler._preempt(scheduler.running[0], plan)  # type: ignore[arg-type]
        return extend(scheduler, plan)  # type: ignore[arg-type]

    with load(made("mean")) as engine:
        whole = engine.embed(TEXTS[2])
    monkeypatch.setattr(Scheduler, "_extend", preempting)
    with load(made("mean"), prefill_chunk=8) as engine:
        assert np.array_equal(engine.embed(TEXTS[2]), whole)
        assert left == [0] and engine.stats().preemptions == 2


def test_vectors_of_fewer_dimensions(made: Callable[..., Made]) -> None:
    """A shortened vector would not have length 1, or a size would be given that the model was not trained for."""
    with load(made("last")) as engine:
        [whole], [short] = engine.embed("abc"), engine.embed("abc", dimensions=16)
        np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
        for wrong in (0, 17, 65):
            with pytest.raises(ParamsError, match=f"dimensions is {wrong}, expected 16, 32"):
                engine.embed("abc", dimensions=wrong)


def test_a_prompt_of_the_model_stands_before_texts(made: Callable[..., Made]) -> None:
    """Vectors would differ from sentence-transformers' for models with a default prompt, and ids would get it as well."""
    with load(made("last", prompt="Q: ", normalized=False, dimensions=None)) as engine:
        [found], [as_ids] = engine.embed("abc"), engine.embed(ids_of("Q: abc"))
        assert np.array_equal(found, as_ids)
        assert np.linalg.norm(found) > 2
        with pytest.raises(ParamsError, match="dimensions is 16, and this model was trained for vectors of 64 numbers only"):
            engine.embed("abc", dimensions=16)


def test_what_an_embedding_model_does_not_do_is_refused(made: Callable[..., Made], bundle: Path) -> None:
    """States would be taken for logits and written as text, or vectors made of logits."""
    with load(made("last")) as engine:
        for ask in (lambda: engine.generate("a"), lambda: engine.submit("a", GenerationParams()), lambda: engine.score([1, 2])):
            with pytest.raises(PromptError, match="embedding model, which writes no text"):
                ask()
        with pytest.raises(PromptError, match=r"has 65 tokens, the KV cache 64"):
            engine.embed([5] * 65)
        assert engine.embed([5] * 64).shape == (1, 64)
    for options in ({"policy": "exact"}, {"policy": "exit"}):
        with pytest.raises(ParamsError, match="embedding model, which runs whole"):
            load(made("last"), **options)
    writes = Engine.load(bundle, EngineOptions(threads=ThreadOptions(1)))
    with writes, pytest.raises(PromptError, match="writes text and has no embeddings"):
        writes.embed("a")


def test_inspect_says_how_texts_are_embedded(made: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle could not be told from one that writes text."""
    inspect(made("mean")[1], as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["embedding"] == {"pooling": "mean", "normalized": True, "prompt": "", "dimensions": [16, 32]}
    inspect(made("last")[1])
    assert "the state of the last token, normalised" in capsys.readouterr().out


def test_a_cancelled_text_has_no_vector(made: Callable[..., Made]) -> None:
    """A text of which half was pooled would look like a finished one."""
    with load(made("mean"), prefill_chunk=1, max_batch=1) as engine:
        handles = [engine.submit_embedding("x" * 60) for _ in range(4)]
        handles[-1].cancel()
        with pytest.raises(EngineClosedError, match="not embedded"):
            handles[-1].result()
        assert np.array_equal(handles[0].result(), handles[1].result())
