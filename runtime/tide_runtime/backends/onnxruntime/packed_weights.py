"""Weights in ONNX Runtime's packed layout, in the machine's cache: every session and process maps one copy.

At session creation ONNX Runtime repacks the constant operand of each product into private memory: two forms of a segment, or two
processes, would hold the weights twice, beside the file. So they are kept packed where a process loads several graphs with the
same weights, or where `EngineOptions.share_weights` or adapters ask for it. One graph in one process gains nothing: a load packs
all weights in any case, and the copy would take the disk of a second model.

An initializer may locate packed layouts in its file, in entries ``prepacked_N`` of its external data:
``OPERATOR+HASH|offset;length;checksum``, as ONNX Runtime writes them
(``session.save_external_prepacked_constant_initializers``, onnxruntime/core/framework/tensor_external_data_info.cc). At load it
still packs each weight. If an entry of the *graph* has the hash of the result, it maps that (since 1.32 after comparing both)
and frees its own copy. So one initializer may have the entries of all weights, and lie in another file than the weights.

The first process that shares a target's weights writes them into ``$TIDE_CACHE_DIR/packed`` or ``~/.cache/tide/packed``, under a
name that depends on the weights, the graphs, the processor and the release of ONNX Runtime. It packs one graph after the other:
no more than one segment's are held in memory. Processes that start meanwhile run without, and so does every process where the
cache cannot be written: the same bits, in more memory. Graphs are loaded from changed bytes that locate the weights from the root
of the file system, because ONNX Runtime reads external data only below one folder.

Only fp32: ONNX Runtime has no fp16 kernels on the CPU and casts fp16 weights to fp32 at load, where no file location exists.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import onnxruntime as ort

from tide_runtime.backends.onnxruntime.model_proto import external_entries, with_location, with_output
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle, sha256_of
from tide_runtime.bundle.manifest import DRAFT, LOOP
from tide_runtime.cached_folders import LIMIT_VARIABLE, CachedFolders
from tide_runtime.machine_cache import cache_folder, processor

MIN_BYTES = 2**26  # size of a weight file from which sharing pays; private copies of smaller ones cost less than a file
DATA, ENTRIES = "packed.bin", "entries.json"
PACKED_OUTPUT = "tide.packed"  # initializer and output of the changed graphs
_PREPACKED = "prepacked_"
_PAGE = 4096
_INLINE_BYTES = 1024  # smaller weights stay in ONNX Runtime's graph
PACKED_SHARE = 1.3  # bytes of a packed weight over those of the weight, with scales: 24 of 20 in a block of 32 weights of 4 bits


@dataclass(frozen=True)
class PackedWeights:
    """``entries``: of every packed layout in ``data``; none: ONNX Runtime packs into private memory, for ``reason``."""

    weights: Path
    data: Path | None = None
    entries: tuple[str, ...] = ()
    reason: str = ""

    def model(self, graph: Path, options: ort.SessionOptions) -> bytes | None:
        """The bytes of ``graph`` with its packed weights, for a session with ``options``; None: load the file as it is."""
        if self.data is None:
            return None
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/")
        places = [("location", _from_root(self.data)), ("offset", "0"), ("length", "4")]
        entries = [(f"{_PREPACKED}{number}", entry) for number, entry in enumerate(self.entries)]
        return with_output(with_location(graph.read_bytes(), _from_root(self.weights)), PACKED_OUTPUT, [*places, *entries])


def packed_weights(
    bundle: Bundle,
    target: str,
    threads: ThreadOptions,
    advance: Callable[[int, int], None] = lambda done, total: None,
    shared: bool = False,
) -> PackedWeights:
    """The packed weights of a target, from the cache; where it has none, they are written first if they are to be shared.

    Args:
        advance: called with the number of graphs that are packed, and of all.
        shared: other processes or adapters use them too, not only several graphs of this bundle.
    """
    info = bundle.manifest.targets[target]
    weights = bundle.path(info.weights) if info.weights is not None else None
    if weights is None or bundle.manifest.dtype != "fp32" or weights.stat().st_size < MIN_BYTES:
        return PackedWeights(weights or bundle.directory)
    if not all(file.sha256 for file in bundle.manifest.files.values()):  # the exporter verifies it before it is hashed
        return PackedWeights(weights)
    packing = _Packing([bundle.path(graph) for graph in _graphs(bundle, target)], weights, threads, advance)
    try:
        folders = CachedFolders(cache_folder("packed"))
        name = _name(bundle, target)
        folder = folders.find(name)
        if folder is None and not shared and not _has_several_forms(bundle, target):
            return PackedWeights(weights)
        if folder is None:
            packing.check_room(folders)
            folder = folders.make(name, packing.write)
        if folder is None:
            return PackedWeights(weights, reason="another process packs them now")
        entries = json.loads((folder / ENTRIES).read_text(encoding="ascii"))
        return PackedWeights(weights.resolve(), folder / DATA, tuple(entries))
    except Exception as error:  # ONNX Runtime raises bare classes of its own; a broken graph is reported where it is loaded
        return PackedWeights(weights, reason=str(error).partition("\n")[0])


def _has_several_forms(bundle: Bundle, target: str) -> bool:
    """Whether an engine loads several graphs with the same weights: those of exits, of a loop, or of a draft head."""
    return bundle.manifest.calibration is not None or not {LOOP, DRAFT}.isdisjoint(bundle.manifest.targets[target].graphs)


def packed_folder(bundle: Bundle, target: str) -> Path | None:
    """The cache's folder with the packed weights of a target for this machine; None: there is none."""
    with suppress(RuntimeError):  # there is no home folder
        folder = cache_folder("packed") / _name(bundle, target)
        return folder if folder.is_dir() else None
    return None


def _graphs(bundle: Bundle, target: str) -> list[str]:
    """Files of the graphs that have all weights of a target: the segments, of which the last has the head, and the draft head."""
    files = bundle.manifest.targets[target].graphs
    names = [*(segment.name for segment in bundle.manifest.segments), DRAFT]
    return [files[name] for name in names if name in files]


def _name(bundle: Bundle, target: str) -> str:
    weights = bundle.manifest.targets[target].weights or ""
    graphs = [sha256_of(bundle.path(file)) for file in _graphs(bundle, target)]  # of the files: the exporter changes copies
    key = json.dumps([processor(), ort.__version__, bundle.manifest.files[weights].sha256, *graphs])
    model = re.sub(r"[^\w.-]", "-", bundle.manifest.model.name)
    return f"{model}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class _Packing:
    """The ``graphs`` that have all ``weights``, to be packed one after the other; ``advance``: see `packed_weights`."""

    graphs: list[Path]
    weights: Path
    threads: ThreadOptions
    advance: Callable[[int, int], None]

    def check_room(self, folders: CachedFolders) -> None:
        """Raise OSError if the cache's limit or its disk has not enough room."""
        weights = self.weights.stat().st_size
        if PACKED_SHARE * weights > folders.limit:
            raise OSError(f"they would take more than {LIMIT_VARIABLE} allows, {folders.limit / 2**30:g} GiB")
        folders.folder.mkdir(parents=True, exist_ok=True)
        # Beside the result, ONNX Runtime writes one graph's weights, as they are and packed.
        needed = weights * (PACKED_SHARE + (1 + PACKED_SHARE) / len(self.graphs))
        if (free := shutil.disk_usage(folders.folder).free) < needed:
            raise OSError(
                f"packing takes {needed / 2**30:.1f} GiB, and the disk of {folders.folder} has {free / 2**30:.1f} GiB free"
            )

    def write(self, path: Path, lock: IO[bytes]) -> None:
        """Write the folder ``path``. Raises OSError, ValueError for graphs that are packed already, and ONNX Runtime's own."""
        workspace = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            entries: dict[str, str] = {}
            with (workspace / DATA).open("wb", buffering=0) as data:
                data.write(bytes(_PAGE))  # the content of the initializer that has the entries
                for number, graph in enumerate(self.graphs):
                    self.advance(number, len(self.graphs))
                    for key, blobs, saved in _packed_by_onnxruntime(graph, self.weights, workspace, self.threads):
                        if key not in entries:  # ONNX Runtime rejects a graph that has a key twice
                            entries[key] = "|".join([key, *(f"{_append(data, saved, *blob)};{blob[1]};0" for blob in blobs)])
            self.advance(len(self.graphs), len(self.graphs))
            (workspace / ENTRIES).write_text(json.dumps([*entries.values()]), encoding="ascii")
            workspace.chmod(0o755)
            workspace.rename(path)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
            with suppress(OSError, AttributeError):  # glibc would keep the memory of the largest graph
                ctypes.CDLL(None).malloc_trim(0)


def _packed_by_onnxruntime(
    graph: Path, weights: Path, workspace: Path, threads: ThreadOptions
) -> Iterator[tuple[str, list[tuple[int, int]], IO[bytes]]]:
    """Key, and offset and length of each blob in the file beside, of every weight that ONNX Runtime packs for ``graph``."""
    known = list(external_entries(graph.read_bytes()))
    if any(key.startswith(_PREPACKED) for key, _ in known):
        raise ValueError("the bundle has packed weights of its own: export it again")
    if {value for key, value in known if key == "location"} - {weights.name}:
        raise ValueError(f"{graph.name} has weights in several files")
    with tempfile.TemporaryDirectory(dir=workspace) as folder:
        saved, content = Path(folder) / "graph.onnx", Path(folder) / "graph.bin"
        options = session_options(threads, chained=True)
        options.optimized_model_filepath = str(saved)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", content.name)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(_INLINE_BYTES))
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        if not content.exists():  # none of its weights is large
            return
        with content.open("rb") as file:
            for name, entry in external_entries(saved.read_bytes()):
                if name.startswith(_PREPACKED):
                    key, *places = entry.split("|")
                    yield key, [(int(place.split(";")[0]), int(place.split(";")[1])) for place in places], file


def _append(data: IO[bytes], source: IO[bytes], offset: int, length: int) -> int:
    """Copy ``length`` bytes of ``source`` to the next page of ``data``, within the kernel; returns where they begin."""
    begin = data.seek(-(-data.tell() // _PAGE) * _PAGE)  # whole pages can be mapped
    end = offset + length
    while offset < end:
        copied = os.sendfile(data.fileno(), source.fileno(), offset, end - offset)
        if not copied:
            raise OSError("the file that ONNX Runtime wrote was cut short: the disk is full")
        offset += copied
    return begin


def _from_root(path: Path) -> str:
    return str(path.absolute())[1:]
