"""Write a bundle into a temporary directory next to its destination and rename it once it is complete."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from tide_runtime.bundle import sha256_of
from tide_runtime.bundle.manifest import MANIFEST_NAME, FileInfo, GraphInfo, TensorInfo, TokenizerInfo
from tide_runtime.errors import OutputError
from transformers import PreTrainedTokenizerFast

from tide_export.graphs.cut import CutGraph
from tide_export.progress import ExportProgress
from tide_export.weights.weight_file import WeightFile

# External data must lie in the folder of the graph that refers to it, so all ONNX targets share one folder.
ONNX_FOLDER = "onnx"
WEIGHTS_NAME = "weights.bin"
_DTYPE_NAMES = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16"}
_TEMPLATES = {
    "default": "chat_template",
    "tool_use": "tool_chat_template",
}  # transformers' names of those that it chooses by itself


@contextmanager
def new_directory(out: Path, force: bool, kind: str = "TIDE bundle", marker: str = MANIFEST_NAME) -> Iterator[Path]:
    """A temporary directory that becomes ``out`` on success and vanishes on any failure or interruption.

    ``force`` replaces only a ``kind``, recognised by its file ``marker``.
    Raises OutputError if ``out`` exists (unless ``force``), cannot be created, or the disk is full.
    """
    if out.exists() and not force:
        raise OutputError(f"{out} exists already; choose another --out, or replace it with --force")
    if out.exists() and not (out / marker).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists and is not a {kind}, so --force does not replace it; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise OutputError(f"cannot write beside {out}: {error.strerror}; choose another --out") from error
    try:
        yield staging
        staging.chmod(0o755)
        _replace(staging, out)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutputError(f"the disk of {out.parent} is full; free some space or choose another --out") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, out: Path) -> None:
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        out.rename(old / out.name)
        staging.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(out)


def write_graphs(
    graphs: list[CutGraph], forms: list[CutGraph], target: str, weights: WeightFile, progress: ExportProgress
) -> dict[str, str]:
    """Write one target's graphs and their ``forms`` into the folder of ``weights``, and tensors that ``weights`` lacks into it.

    Returns graph name → file for both.
    """
    folder = weights.path.parent
    total = sum(v.const_value.nbytes for g in graphs for v in g.model.graph.initializers.values() if v.const_value is not None)
    with progress.phase("write weights", total) as weights.progress:
        for graph in (*graphs, *forms):
            weights.externalise(graph.model)
    files = {}
    for graph in (*graphs, *forms):
        files[graph.name] = f"{ONNX_FOLDER}/{target}.{graph.name}.onnx"
        ir.save(graph.model, folder / f"{target}.{graph.name}.onnx")
    return files


def check_room(directory: Path, needed: int) -> None:
    """Raise OutputError if the disk of ``directory`` has fewer than ``needed`` bytes free: said before minutes of work."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OutputError(
            f"the bundle's weights take at least {needed / 2**30:.1f} GiB, and the disk of {directory.parent} has "
            f"{free / 2**30:.1f} GiB free; free some space or choose another --out"
        )


def onnx_weights(directory: Path) -> WeightFile:
    """The weights that all ONNX targets of the bundle in ``directory`` share."""
    (directory / ONNX_FOLDER).mkdir(exist_ok=True)
    return WeightFile(directory / ONNX_FOLDER / WEIGHTS_NAME)


def describe(graph: CutGraph) -> GraphInfo:
    """The manifest entry of a graph."""
    model = graph.model.graph
    parameters = sum(v.const_value.size for v in model.initializers.values() if v.const_value is not None)
    layers = None if graph.layers is None else list(graph.layers)
    return GraphInfo(graph.name, layers, parameters, [_tensor(v) for v in model.inputs], [_tensor(v) for v in model.outputs])


def _tensor(value: ir.Value) -> TensorInfo:
    dtype = value.dtype.name if value.dtype is not None else "UNDEFINED"
    shape = [d if isinstance(d, int) else str(d.value) for d in value.shape] if value.shape is not None else []
    return TensorInfo(value.name or "", _DTYPE_NAMES.get(dtype, dtype.lower()), shape)


def list_files(directory: Path) -> dict[str, FileInfo]:
    """Relative path → size of every file below ``directory`` but the manifest, not hashed yet."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST_NAME)
    return {p.relative_to(directory).as_posix(): FileInfo("", p.stat().st_size) for p in files}


def hash_files(files: Mapping[str, FileInfo], directory: Path) -> dict[str, FileInfo]:
    """``files`` with their SHA-256, of what is on the disk and not in the page cache: what reads them warm comes before."""
    for name in files:
        _drop_from_page_cache(directory / name)
    return {name: replace(info, sha256=sha256_of(directory / name)) for name, info in files.items()}


def _drop_from_page_cache(file: Path) -> None:
    """Evict ``file`` from the page cache, so that the next access reads it from the disk.

    Linux caches pages that it reads in larger folios than pages that were written. A mapped bundle runs from the page cache, and
    the demo model decoded some percent slower from the pages that the exporter had written.
    """
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # only clean pages can be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> TokenizerInfo:
    """Write the files under ``directory`` / tokenizer. It may have more tokens than the model, which prompts must not use."""
    folder = directory / "tokenizer"
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates}
    files = {}
    for name, field in _TEMPLATES.items():
        if template := named.get(name):
            (folder / f"{field}.jinja").write_text(template, encoding="utf-8")
            files[field] = f"tokenizer/{field}.jinja"
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerInfo("tokenizer/tokenizer.json", files.get("chat_template"), special, files.get("tool_chat_template"))
