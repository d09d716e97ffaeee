"""GGUF files of embedding models: tiny random ones, exported from the file and from the HuggingFace folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_in_process import Done, cli_runner
from export.sources.gguf.tiny_gguf import VOCAB, GgufFile, tiny
from export.tiny_embedding import CONFIG, POOLINGS, write_pooling
from numpy.typing import NDArray
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import TideError

from tide_export import cli, export
from tide_export.load import load_model

TEXTS = ["def add(a, b):", "a", "The quick brown fox jumps over the lazy dog.", ""]
END = VOCAB - 1
IDS = [[*text.encode("ascii"), END] for text in TEXTS]


def file_of(architecture: str, pooling: int | None, tied: bool = True) -> GgufFile:
    content = tiny(architecture, {"tie_word_embeddings": tied}, pooling_type=pooling)
    content.keys["tokenizer.ggml.add_eos_token"] = True  # as Qwen3-Embedding's file has it
    return content


def exported(source: Path, out: Path, tokenizer: Path | None = None) -> tuple[EmbeddingInfo | None, NDArray[np.float32]]:
    """How the bundle embeds texts, and their vectors."""
    given = str(tokenizer) if tokenizer is not None else None
    manifest = export(str(source), out, replace(CONFIG, tokenizer=given))
    with Engine.load(out, EngineOptions(threads=ThreadOptions(1))) as engine:
        found = engine.embed(TEXTS)
        assert np.array_equal(found, engine.embed(IDS))
    return manifest.embedding, found


@pytest.mark.parametrize(
    ("architecture", "number", "pooling", "tied", "kind"),
    [
        ("qwen3", 3, "last", True, "Q8_0"),  # as Qwen3-Embedding-0.6B
        pytest.param("qwen3", 3, "last", True, "F32", marks=pytest.mark.slow),
        pytest.param("qwen3", 3, "last", False, "F32", marks=pytest.mark.slow),  # with a head, which the vectors do without
        pytest.param("gemma2", 1, "mean", True, "F32", marks=pytest.mark.slow),
    ],
)
def test_vectors_are_those_of_the_huggingface_folder(
    architecture: str, number: int, pooling: str, tied: bool, kind: str, tmp_path: Path
) -> None:
    """Breaks: an embedding model in GGUF is refused, writes text, or gives vectors that an index of the original has not."""
    content, folder = file_of(architecture, number, tied), tmp_path / "model"
    file = content.write(tmp_path / "model.gguf", kind=kind)
    content.model.base_model.save_pretrained(folder)
    write_pooling(folder, POOLINGS[pooling])
    info, found = exported(file, tmp_path / "from_file")
    wanted_info, wanted = exported(folder, tmp_path / "from_folder", tokenizer=file)
    assert info == wanted_info == EmbeddingInfo(pooling, True)
    if kind == "F32":
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    else:
        assert np.min(np.sum(found * wanted, axis=1)) > 0.99


@pytest.mark.parametrize("pooling", [None, 0])
def test_a_file_without_pooling_writes_text(pooling: int | None, tmp_path: Path) -> None:
    """Breaks: language models whose file says that nothing is pooled lose their head."""
    loaded = load_model(str(file_of("qwen3", pooling).write(tmp_path / "model.gguf")), "fp32", stream=True)
    assert loaded.embedding is None and loaded.model.get_output_embeddings() is not None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """``tide-export`` in this process."""
    return cli_runner("tide-export", cli.main, monkeypatch, capsys, 400)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        (2, "qwen3.pooling_type = 2: it pools by cls, and TIDE compiles mean and last; take an embedding model that pools so"),
        (4, "qwen3.pooling_type = 4: it ranks texts by a classifier, which TIDE does not compile; of a causal language model"),
        (7, "qwen3.pooling_type = 7: no such pooling is known; convert the model again"),
    ],
)
def test_other_poolings_are_refused_by_name(pooling: int, message: str, tmp_path: Path, run: Callable[..., Done]) -> None:
    """Breaks: a model is compiled to vectors or texts that are not its own, or half a bundle is left behind."""
    content = file_of("qwen3", pooling)
    content.keys["qwen3.classifier.output_labels"] = ["yes", "no"]
    content.tensors["cls.output.weight"] = np.zeros((2, 64), np.float32)
    done = run(content.write(tmp_path / "model.gguf"), "--out", tmp_path / "engine")
    assert done.code == TideError.exit_code == 2
    assert message in " ".join(done.err.split()) and "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
