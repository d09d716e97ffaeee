"""Packed weights in the bundle: every graph uses them on matching processors and computes the same on others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tide_runtime.errors import OutputError, TargetError

from tide_export.cut import CutGraph
from tide_export.lower import LoweredModel
from tide_export.packed_weights import WeightPacker, read_range
from tide_export.progress import ExportProgress
from tide_export.targets import find_target
from tide_export.targets.base import BuildJob
from tide_export.targets.engine_cache import EngineCache
from tide_export.weights import WeightFile

NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
INTEGERS = {"input_ids": 5, "total_sequence_length": 1, "query_seqlens": 1}  # of one token at slot 0; others are 0
UNTIED = ("llama", "phi")  # architectures with untied embeddings, without and with biases
Places = Iterable[tuple[int, int]]  # offset and length in weights.bin


def entries(tensor: TensorProto) -> list[onnx.StringStringEntryProto]:
    return [entry for entry in tensor.external_data if entry.key.startswith("prepacked")]


def packed_places(tensor: TensorProto) -> Places:
    parts = [part for entry in entries(tensor) for part in entry.value.split("|")[1:]]
    return [(int(offset), int(length)) for offset, length, _ in (part.split(";") for part in parts)]


def unpack(tensor: TensorProto) -> Places:
    """Remove the packed layouts of ``tensor``; returns the place of its unpacked values."""
    values = {entry.key: entry.value for entry in tensor.external_data if not entry.key.startswith("prepacked")}
    del tensor.external_data[:]
    for key, value in values.items():
        tensor.external_data.add(key=key, value=value)
    return [(int(values["offset"]), int(values["length"]))]


def foreign(tensor: TensorProto) -> Places:
    """Change the hashes of ``tensor``'s packed layouts to those of another processor; returns their places."""
    places = packed_places(tensor)
    for entry in entries(tensor):
        entry.value = entry.value.replace("|", "7|", 1)
    return places


def zero(folder: Path, change: Callable[[TensorProto], Places]) -> None:
    """Apply ``change`` to every packed weight of the graphs in ``folder`` and zero the returned places in weights.bin."""
    with (folder / "weights.bin").open("r+b") as weights:
        for file in folder.glob("*.onnx"):
            model = onnx.load(file, load_external_data=False)
            for tensor in [t for t in model.graph.initializer if entries(t)]:
                for offset, length in change(tensor):
                    weights.seek(offset)
                    weights.write(bytes(length))
            onnx.save(model, file)


def load(file: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession) -> list[np.ndarray]:
    """Outputs of a graph for one token and random caches."""
    random, feeds = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else 8 if d == "slots" else 1 for d in value.shape]
        made = random.standard_normal(shape) if value.type == "tensor(float)" else np.full(shape, INTEGERS.get(value.name, 0))
        feeds[value.name] = np.asarray(made, NUMPY[value.type])
    return session.run(None, feeds)


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def copied(exported, name, tmp_path) -> Callable[[str], Path]:
    """``copied(folder)``: the ONNX files of a tiny model's bundle once more."""
    source = exported(name).engine.bundle.directory / "onnx"
    return lambda folder: Path(shutil.copytree(source, tmp_path / folder))


@pytest.mark.parametrize("name", UNTIED)
def test_every_graph_runs_on_the_packed_weights(copied, name):
    """A graph that does not find a weight packed keeps a copy of its own: memory times graphs, engines and processes.

    Packed weights that become 0 in the file of a loaded graph must make it what weights that are 0 make it: it maps them, and
    reads no others. (Not before it is loaded: since 1.32, ONNX Runtime compares them with what it packs itself.)
    """
    packed, own = copied("packed"), copied("own")
    zero(own, unpack)
    loaded = {file.name: load(file) for file in sorted(packed.glob("*.onnx"))}
    assert {"cpu.segment_0.onnx", "cpu.segment_1.onnx", "cpu.uncut.onnx"} <= set(loaded)
    before = {file: run(session) for file, session in loaded.items()}
    zero(packed, packed_places)
    for file, session in loaded.items():
        ours = run(session)
        assert equal(ours, run(load(own / file))), file
        assert not equal(ours, before[file]), f"{file} multiplies with no packed weight"


@pytest.mark.parametrize("name", UNTIED)
def test_another_processor_computes_the_same(copied, name):
    """A bundle would run only on the kind of processor that exported it; another layout has another hash."""
    whole, elsewhere = copied("whole"), copied("elsewhere")
    zero(elsewhere, foreign)
    for file in sorted(whole.glob("*.onnx")):
        assert equal(run(load(file)), run(load(elsewhere / file.name))), file.name


@pytest.mark.parametrize("name", UNTIED)
def test_graphs_share_one_packed_copy(exported, name):
    """The bundle would hold the packed weights once per graph."""
    folder, places = exported(name).engine.bundle.directory / "onnx", set()
    for file in folder.glob("*.onnx"):
        tensors = onnx.load(file, load_external_data=False).graph.initializer
        places |= {place for tensor in tensors for place in packed_places(tensor)}
    floats = 4 * exported(name).manifest.model.parameters
    assert floats * 0.5 < sum(length for _, length in places) < floats * 1.05
    assert all(offset % 4096 == 0 for offset, _ in places), "cannot be mapped"


@pytest.fixture
def twice(tmp_path) -> Path:
    """A graph that multiplies with two equal weights, beside their file: 1024 times the sum of each row."""
    ones = [numpy_helper.from_array(np.ones((32, 32), np.float32), name) for name in ("first", "second")]
    nodes = [helper.make_node("MatMul", ["x", "first"], ["y"]), helper.make_node("MatMul", ["y", "second"], ["z"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 32]) for name in ("x", "z")]
    graph = helper.make_graph(nodes, "twice", values[:1], values[1:], ones)
    model = ir.from_proto(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]))
    with WeightFile(tmp_path / "weights.bin") as weights:
        weights.externalise(model)
    ir.save(model, tmp_path / "twice.onnx")
    return tmp_path / "twice.onnx"


def pack(file: Path) -> None:
    with WeightFile(file.with_name("more.bin")) as weights:
        WeightPacker(weights, file.parent).pack(file)


def test_equal_weights_of_one_graph(twice):
    """ONNX Runtime rejects a graph that lists the same packed content twice."""
    before = run(load(twice))
    pack(twice)
    assert [len(entries(tensor)) for tensor in onnx.load(twice, load_external_data=False).graph.initializer] == [1, 0]
    assert equal(before, run(load(twice)))


def test_a_graph_that_onnxruntime_refuses(twice):
    """The export would end in an ONNX Runtime exception that names neither the graph nor the fix."""
    model = onnx.load(twice, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, twice)
    with pytest.raises(TargetError, match=r"cannot pack the weights of twice\.onnx .*--no-packed-weights"):
        pack(twice)


def test_packed_weights_cut_short(tmp_path):
    """If the disk fills up during packing, the bundle would hold truncated weights."""
    (tmp_path / "graph.bin").write_bytes(bytes(100))
    with pytest.raises(OutputError, match="the disk is full"):
        read_range(tmp_path / "graph.bin", 64, 64)


@pytest.mark.parametrize(("target", "dtype", "wanted"), [("cpu", "fp32", False), ("cpu", "fp16", True), ("cuda", "fp32", True)])
def test_where_weights_are_not_packed(twice, tmp_path, target, dtype, wanted):
    """A bundle would be twice as large without use: the option is off, or the target reads no packed weights."""
    graph = CutGraph("twice", ir.load(twice), None)
    job = BuildJob(tmp_path, tmp_path, dtype, [], ExportProgress(quiet=True), EngineCache(tmp_path), packed_weights=wanted)
    info = find_target(target, dtype).builder.build(find_target(target, dtype), LoweredModel([graph], [], []), job)
    job.close()
    tensors = onnx.load(tmp_path / info.graphs["twice"], load_external_data=False).graph.initializer
    assert len(tensors) == 2 and not any(entries(tensor) for tensor in tensors)
