"""Packed weights in the machine's cache: every graph maps them, computes the same bits, and does without where it must."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.onnxruntime import packed_weights as module
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.onnxruntime.model_proto import external_entries, with_location, with_output
from tide_runtime.backends.onnxruntime.packed_weights import DATA, ENTRIES, PACKED_OUTPUT, PackedWeights
from tide_runtime.bundle import Bundle

THREADS = ThreadOptions(1)
NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
packed_weights = partial(module.packed_weights, shared=True)
INTEGERS = {"input_ids": 5, "total_sequence_length": 1, "query_seqlens": 1}  # of one token at slot 0; others are 0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle, verify=False)


@pytest.fixture
def packed(opened: Bundle) -> PackedWeights:
    found = packed_weights(opened, "cpu", THREADS)
    assert found.reason == "" and found.data is not None
    return found


def run(session: ort.InferenceSession) -> list[np.ndarray]:
    """Outputs of a graph for one token and random caches."""
    random, feeds = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else 8 if d == "slots" else 1 for d in value.shape]
        made = random.standard_normal(shape) if value.type == "tensor(float)" else np.full(shape, INTEGERS.get(value.name, 0))
        feeds[value.name] = np.asarray(made, NUMPY[value.type])
    return session.run([value.name for value in session.get_outputs() if value.name != PACKED_OUTPUT], feeds)


def loaded(opened: Bundle, graph: str, packed: PackedWeights | None) -> ort.InferenceSession:
    path, options = opened.path(opened.manifest.targets["cpu"].graphs[graph]), ort.SessionOptions()
    model = packed.model(path, options) if packed is not None else None
    return ort.InferenceSession(model or str(path), options, providers=["CPUExecutionProvider"])


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def blobs(packed: PackedWeights) -> list[tuple[int, int]]:
    """Offset and length of every blob."""
    return [(int(o), int(n)) for entry in packed.entries for o, n, _ in (blob.split(";") for blob in entry.split("|")[1:])]


GRAPHS = ("segment_0", "segment_1", "segment_2", "uncut")


def test_every_graph_runs_on_the_packed_weights(opened: Bundle, packed: PackedWeights) -> None:
    """A graph that does not find a weight packed keeps a copy of its own: memory times graphs and processes.

    Packed weights that become 0 in the file of a loaded graph must change what it computes: it maps them, and reads no others.
    (Not before it is loaded: since 1.32, ONNX Runtime compares them with what it packs itself.)
    """
    names = [name for name in GRAPHS if name in opened.manifest.targets["cpu"].graphs]
    assert {"segment_0", "uncut"} <= set(names)
    sessions = {name: loaded(opened, name, packed) for name in names}
    before = {name: run(session) for name, session in sessions.items()}
    for name in names:
        assert equal(before[name], run(loaded(opened, name, None))), f"{name} computes other bits"
    assert packed.data is not None
    with packed.data.open("r+b") as file:
        for offset, length in blobs(packed):
            file.seek(offset)
            file.write(bytes(length))
    for name, session in sessions.items():
        assert not equal(run(session), before[name]), f"{name} multiplies with no packed weight"


def test_one_copy_that_can_be_mapped(opened: Bundle, packed: PackedWeights, cache: Path) -> None:
    """The file would hold the weights once per graph, or ONNX Runtime read it into memory."""
    weights = opened.path(opened.manifest.targets["cpu"].weights or "")
    assert packed.data is not None and packed.data.stat().st_size < 1.2 * weights.stat().st_size + 4096 * len(packed.entries)
    assert all(offset % 4096 == 0 for offset, _ in blobs(packed))
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [packed.data.parent.name], "left temporary files"
    assert sorted(path.name for path in packed.data.parent.iterdir()) == sorted([DATA, ENTRIES])


def test_weights_are_packed_once(opened: Bundle, packed: PackedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load would take the time of the first."""
    monkeypatch.setattr(module, "_packed_by_onnxruntime", lambda *a: pytest.fail("packed again"))
    assert packed_weights(opened, "cpu", THREADS) == packed


def test_another_processor_packs_its_own(opened: Bundle, packed: PackedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that several machines mount would hold the layouts of one of them only."""
    monkeypatch.setattr(module, "processor", lambda: "another")
    other = packed_weights(opened, "cpu", THREADS)
    assert other.data is not None and packed.data is not None and other.data != packed.data


def test_foreign_entries_change_nothing(opened: Bundle, packed: PackedWeights) -> None:
    """Entries of another release would be computed with; their hashes match nothing."""
    foreign = PackedWeights(packed.weights, packed.data, tuple(entry.replace("|", "7|", 1) for entry in packed.entries))
    assert equal(run(loaded(opened, "uncut", foreign)), run(loaded(opened, "uncut", None)))


def test_one_graph_in_one_process_keeps_its_weights_to_itself(opened: Bundle, cache: Path) -> None:
    """Every model would take its size twice on the disk, and the first answer would wait for the copy."""
    found = module.packed_weights(opened, "cpu", THREADS)
    assert found.data is None and found.reason == "" and not any(cache.glob("*"))


def test_an_engine_generates_the_same_with_and_without(bundle: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The cache would change texts; or an engine refuse the graphs, whose interface has another output."""
    texts = []
    for least in (0, 2**40):
        monkeypatch.setattr(module, "MIN_BYTES", least)
        with Engine.load(bundle, EngineOptions(threads=THREADS, policy="full", share_weights=True)) as engine:
            texts.append(engine.generate("def add", GenerationParams(max_new_tokens=8, ignore_eos=True))[0].token_ids)
            assert engine.backend.private_weights == ""
    assert texts[0] == texts[1] and cache.is_dir()


def test_a_cache_that_cannot_be_written(opened: Bundle, bundle: Path, cache: Path) -> None:
    """A read-only home folder would make every load fail; the reason has to be shown."""
    cache.parent.write_text("a file", encoding="utf-8")
    backend = OnnxRuntimeBackend.load(opened, "cpu", THREADS, share_weights=True)
    assert "File exists" in backend.private_weights or "Not a directory" in backend.private_weights


def test_no_room(opened: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing would fill the user's disk, or the cache outgrow its limit."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    assert "GiB free" in packed_weights(opened, "cpu", THREADS).reason
    monkeypatch.setenv("TIDE_CACHE_GIB", "0")
    assert "more than TIDE_CACHE_GIB allows, 0 GiB" in packed_weights(opened, "cpu", THREADS).reason
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_failure_leaves_nothing(opened: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file would be mapped by the next process."""

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_append", fail)
    found = packed_weights(opened, "cpu", THREADS)
    assert found.data is None and "No space left" in found.reason
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_bundle_that_is_not_hashed_yet(opened: Bundle, cache: Path) -> None:
    """The exporter verifies bundles before their files have hashes: all of them would have the same name in the cache."""
    files = {name: replace(info, sha256="") for name, info in opened.manifest.files.items()}
    unhashed = Bundle(opened.directory, replace(opened.manifest, files=files))
    assert packed_weights(unhashed, "cpu", THREADS).data is None and not cache.exists()


def test_others_do_without_while_one_packs(opened: Bundle, cache: Path) -> None:
    """A second server would wait, or write the same file."""
    found = []

    def second_process(done: int, total: int) -> None:
        if not found:
            found.append(packed_weights(opened, "cpu", THREADS))

    assert packed_weights(opened, "cpu", THREADS, second_process).data is not None
    assert [(one.data, one.reason) for one in found] == [(None, "another process packs them now")]


def test_a_bundle_with_packed_weights_of_its_own(opened: Bundle, tmp_path: Path) -> None:
    """ONNX Runtime refuses a graph that lists a packed weight twice."""
    copy = Path(shutil.copytree(opened.directory, tmp_path / "copy"))
    old = Bundle.open(copy, verify=False)
    graph = old.path(old.manifest.targets["cpu"].graphs["segment_0"])
    own = [("location", "weights.bin"), ("prepacked_0", "MatMul+1|0;4096;0")]
    graph.write_bytes(with_output(graph.read_bytes(), "own", own))
    assert "packed weights of its own" in packed_weights(old, "cpu", THREADS).reason


def test_only_locations_change(opened: Bundle) -> None:
    """A weight would be read from another place of the file; a graph that is no message would be cut."""
    graph = opened.path(opened.manifest.targets["cpu"].graphs["uncut"]).read_bytes()
    moved = with_location(graph, "home/weights.bin")
    assert [e for e in external_entries(moved) if e[0] != "location"] == [
        e for e in external_entries(graph) if e[0] != "location"
    ]
    assert {value for key, value in external_entries(moved) if key == "location"} == {"home/weights.bin"}
    assert onnx.load_from_string(with_location(moved, "weights.bin")) == onnx.load_from_string(graph)
    with pytest.raises(ValueError, match="cut short"):
        with_location(graph[:-3], "elsewhere")
