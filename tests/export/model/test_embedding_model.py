"""Export of embedding models: sentence-transformers' files, checkpoints with and without a head, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export.tiny_embedding import CONFIG, NORMALIZED, POOLINGS, embedded, ids_of, write_embedding_model
from slow_cases import slow_but
from tide_runtime import Engine
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import CalibrationError, ParamsError, TargetError, UnsupportedModelError, VerificationError
from transformers import AutoConfig

from tide_export import export
from tide_export.calibration.exit_calibration import check_can_exit
from tide_export.load import load_model
from tide_export.model.embedding_model import read_embedding

TEXT = "def add(a, b):"


def read(folder: Path) -> EmbeddingInfo | None:
    return read_embedding(str(folder), None, AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("architecture", "bare", "config"),
    [
        ("qwen3", True, {"tie_word_embeddings": True}),  # as Qwen3-Embedding-0.6B
        pytest.param("qwen3", True, {"tie_word_embeddings": False}, marks=pytest.mark.slow),  # as Qwen3-Embedding-8B
        pytest.param("qwen3", False, {}, marks=pytest.mark.slow),  # as trained with its head
        pytest.param("gemma2", False, {}, marks=pytest.mark.slow),  # which caps its logits
    ],
)
def test_vectors_are_the_base_models(architecture: str, bare: bool, config: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint without a head would be refused, or the head's scales and caps would end up in the vectors."""
    model = write_embedding_model(tmp_path / "model", architecture, bare=bare, **config)
    manifest = export(str(tmp_path / "model"), tmp_path / "out", replace(CONFIG, tokenizer="none"))
    assert manifest.model.vocab_size == 128 and manifest.embedding == EmbeddingInfo("last", True)
    with Engine.load(tmp_path / "out") as engine:
        found = engine.embed(ids_of(TEXT))
    np.testing.assert_allclose(found, embedded(model, [ids_of(TEXT)], "last"), atol=1e-5)


@pytest.mark.parametrize(("weights", "least"), slow_but([("int8", 0.99), ("int4", 0.9)]))
def test_low_bit_weights_are_verified_and_near(weights: str, least: float, tmp_path: Path) -> None:
    """`--weights int4` would fail in the measurement of a head that is not there, or pass with other vectors."""
    model = write_embedding_model(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "out", replace(CONFIG, weights=weights))
    with Engine.load(tmp_path / "out") as engine:
        [found] = engine.embed(TEXT)
    assert float(found @ embedded(model, [ids_of(TEXT)], "last")[0]) > least


def test_a_bundle_with_other_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the eager model would let wrong final states pass, as there are no logits to look at."""
    from tide_export.verify import verify_bundle as verify

    write_embedding_model(tmp_path / "model")
    as_it_runs = verify._as_it_runs
    monkeypatch.setattr(verify, "_as_it_runs", lambda *given: (as_it_runs(*given)[0][:, ::-1], []))
    with pytest.raises(VerificationError, match="cosine similarity"):
        export(str(tmp_path / "model"), tmp_path / "out", CONFIG)


@pytest.mark.parametrize(
    ("pooling", "modules", "wanted"),
    [
        (POOLINGS["mean"], NORMALIZED, EmbeddingInfo("mean", True)),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, NORMALIZED[:2], EmbeddingInfo("last", False)),
        ({"pooling_mode": ["mean"]}, NORMALIZED, EmbeddingInfo("mean", True)),
        ({"pooling_mode_lasttoken": False}, NORMALIZED, EmbeddingInfo("mean", True)),  # none is on: the mean, as there
    ],
)
def test_both_forms_of_pooling_files_are_read(
    pooling: dict[str, Any], modules: tuple[str, ...], wanted: EmbeddingInfo, tmp_path: Path
) -> None:
    """Vectors would be pooled otherwise than the model was trained for."""
    write_embedding_model(tmp_path, pooling=pooling, modules=modules)
    assert read(tmp_path) == wanted


def test_default_prompt_and_dimensions_are_read(tmp_path: Path) -> None:
    """Vectors would differ from sentence-transformers', which puts the default prompt before each text."""
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    write_embedding_model(tmp_path, prompts=prompts, matryoshka_dimensions=[16, 32])
    assert read(tmp_path) == EmbeddingInfo("last", True, "Q: ", [16, 32])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"modules": [*NORMALIZED[:2], "Dense", "Normalize"]}, "lists Transformer, Pooling, Dense, Normalize"),
        ({"pooling": {"pooling_mode_cls_token": True}}, "pools by cls"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "pools by weightedmean"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}}, "pools by max and mean"),
        ({"pooling": {**POOLINGS["mean"], "include_prompt": False}}, "leaves out the tokens of the prompt"),
        ({"is_causal": False}, "tokens attend to later ones"),
        ({"use_bidirectional_attention": True}, "tokens attend to later ones"),
    ],
)
def test_other_models_are_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A model would be compiled to vectors that are not its own."""
    write_embedding_model(tmp_path, **changed)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path), "fp32", stream=True)


def test_what_has_no_meaning_for_embeddings_is_refused(tmp_path: Path) -> None:
    """Minutes of calibration, or graphs for a GPU that nothing has run, would come before a puzzling error."""
    write_embedding_model(tmp_path / "model")
    source, out = str(tmp_path / "model"), tmp_path / "out"
    with pytest.raises(ParamsError, match="--draft-head"):
        export(source, out, replace(CONFIG, draft_head="mtp"))
    with pytest.raises(TargetError, match="final states"):
        export(source, out, replace(CONFIG, targets=("torch",)))
    with pytest.raises(CalibrationError, match="embedding model"):
        check_can_exit(load_model(source, "fp32"))
    assert not out.exists()
