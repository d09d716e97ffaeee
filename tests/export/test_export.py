"""Complete exports of one tiny model: bundle content, precisions, shared weights, effect of the passes."""

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export.architectures import FEW_LAYERS, VOCAB, tiny_model
from rich.console import Console
from tide_runtime.bundle.manifest import read_manifest
from tiny_tokenizer import write_byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export import ExportConfig, export
from tide_export.bundle_writer import hash_files, list_files
from tide_export.progress import ExportProgress
from tide_export.trace.trace_model import trace


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=[2, 7],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tied") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


CONFIG = ExportConfig(checkpoints="2,4", max_seq_len=48, explain=True)


@pytest.fixture(scope="module")
def bundle(model_directory, tmp_path_factory):
    """Folder, manifest and printed lines of one verified export, which torch traced; shared by the tests."""
    out, printed = tmp_path_factory.mktemp("bundle") / "engine", io.StringIO()
    progress = ExportProgress(Console(file=printed, force_terminal=False, width=200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return out, export(str(model_directory), out, CONFIG, progress=progress), printed.getvalue()


def test_verified_export(bundle):
    """The manifest of a default export would not describe its bundle."""
    out, manifest, _ = bundle
    assert read_manifest(out) == manifest
    assert manifest.targets["cpu"].verified.startswith("on a processor, ")
    assert [s.layers for s in manifest.segments] == [[0, 2], [2, 4], [4, 5]]
    assert manifest.generation.eos_token_ids == [2, 7]
    assert manifest.max_seq_len == 48 and manifest.tokenizer is not None
    assert manifest.targets["cpu"].passes["attention_gqa"] == manifest.targets["cpu"].passes["pack_projections"] == 5


def test_weights_are_stored_once(bundle):
    """Tied embeddings or weights shared by segments would be written twice: a bundle larger than its model."""
    out, manifest, _ = bundle
    weights = (out / "onnx" / "weights.bin").stat().st_size
    floats = 4 * manifest.model.parameters
    assert floats * 0.95 < weights < floats * 1.05 + 4096 * 100  # alignment to pages
    for path in (out / "onnx").glob("*.onnx"):
        assert path.stat().st_size < 100_000, f"{path.name} carries weights"


@pytest.mark.usefixtures("traced_anew")
def test_same_model_same_bytes(bundle, model_directory, tmp_path):
    """Two exports of one model could not be told from two models."""
    _, first, _ = bundle
    second = export(str(model_directory), tmp_path / "engine", CONFIG)
    assert first.files == second.files and first.model == second.model


def test_attention_cost_follows_the_valid_length(bundle):
    """A cache for long contexts would slow down short ones: for one row, no operator may run over all of its slots."""
    out, manifest, _ = bundle
    for file in (manifest.targets["cpu"].graphs[graph.name] for graph in manifest.graphs):
        graph = onnx.load(out / file, load_external_data=False).graph
        caches = {v.name for v in graph.input if "_cache_" in v.name}
        readers = {n.op_type for n in graph.node if caches & set(n.input)}
        assert readers <= {"GroupQueryAttention"}


@pytest.mark.usefixtures("traced_anew")
def test_tracing_keeps_the_model_unchanged():
    """Tracing would leave hooks or another attention function behind in the user's model."""
    model = tiny_model("mixtral", layers=FEW_LAYERS)
    ids = torch.arange(3, 9)[None] % VOCAB
    with torch.no_grad():
        before = model(ids).logits
        trace(model)
        after = model(ids).logits
    assert torch.equal(before, after)
    assert np.isfinite(after.numpy()).all()


def test_hashes_are_taken_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hash of the page cache would miss a write error of the disk."""
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip() in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory is memory itself")
    cached: list[bool] = []

    def look(path: Path) -> str:
        with path.open("rb") as file:
            try:
                cached.append(os.preadv(file.fileno(), [bytearray(4096)], 0, os.RWF_NOWAIT) > 0)
            except BlockingIOError:
                cached.append(False)
        return ""

    monkeypatch.setattr("tide_export.bundle_writer.sha256_of", look)
    (tmp_path / "weights.bin").write_bytes(bytes(1 << 20))
    look(tmp_path / "weights.bin")
    hash_files(list_files(tmp_path), tmp_path)
    assert cached == [True, False]
