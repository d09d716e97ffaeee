"""Verification of bundles with low-bit weights: int8 activations must not hide a weight that is wrong."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from export.architectures import MAX_POSITIONS, tiny_model
from numpy.typing import NDArray
from tide_runtime.backends.step_arrays import StepPositions
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.errors import VerificationError

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import quantized
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify import text_pass
from tide_export.verify.check_results import GraphCheck, PromptCheck
from tide_export.verify.verify_bundle import check_bundle, mean_divergence, verify_bundle

Exported = tuple[LoadedModel, Path]
CONFIG = ExportConfig(checkpoints="2", max_seq_len=MAX_POSITIONS // 2, verify=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A model in int4 and its bundle."""
    loaded = quantized(LoadedModel(tiny_model("llama"), None, "llama"), "int4", "rtn")
    directory = tmp_path_factory.mktemp("int4")
    write_bundle(loaded, directory, CONFIG, ExportProgress(quiet=True))
    return loaded, directory


def edited(directory: Path, tmp_path: Path, edit: Callable[[NDArray[np.uint8], str], None]) -> Path:
    """A copy whose low-bit weights and scales ``edit`` has changed, given their bytes and "values" or "scales"."""
    copy = Path(shutil.copytree(directory, tmp_path / "bundle"))
    weights = np.fromfile(copy / "onnx" / "weights.bin", np.uint8)
    seen = set()
    for file in (copy / "onnx").glob("cpu.*.onnx"):
        for tensor in onnx.load(file, load_external_data=False).graph.initializer:
            part, place = tensor.name.rpartition(".")[2], {entry.key: entry.value for entry in tensor.external_data}
            if part in ("values", "scales") and place.get("offset") not in (None, *seen):
                seen.add(place["offset"])
                begin = int(place["offset"])
                edit(weights[begin : begin + int(place["length"])], part)
    assert seen, "the bundle keeps no low-bit weight in its file"
    weights.tofile(copy / "onnx" / "weights.bin")
    return copy


def swap_nibbles(part: NDArray[np.uint8], kind: str) -> None:
    if kind == "values":
        part[:] = part << 4 | part >> 4


def enlarge_scales(part: NDArray[np.uint8], kind: str) -> None:
    if kind == "scales":
        part.view(np.float32)[:] *= 1.02


def test_a_right_bundle_passes(exported: Exported) -> None:
    """Every export to int4 would end in an error, or the report would hide what int8 activations cost."""
    checks = verify_bundle(*exported, "fp32")
    graphs, rounded = ([c for c in checks if isinstance(c, kind)] for kind in (GraphCheck, PromptCheck))
    assert [check.graph for check in graphs] == ["segment_0", "segment_1", "uncut"]
    assert all(check.tolerance is None and "KL divergence" in str(check) for check in rounded)
    assert max(c.max_difference for c in rounded) > 10 * graphs[-1].max_difference, "the graphs round as the bundle does"


@pytest.mark.parametrize("edit", [swap_nibbles, enlarge_scales])
def test_wrong_weights_are_refused(exported: Exported, tmp_path: Path, edit: Callable[[NDArray[np.uint8], str], None]) -> None:
    """A mapping that swaps neighbours or misreads a scale would ship as a slightly worse model."""
    loaded, directory = exported
    with pytest.raises(VerificationError, match="differs from the eager model"):
        verify_bundle(loaded, edited(directory, tmp_path, edit), "fp32")


def test_a_fault_has_a_place(exported: Exported, tmp_path: Path) -> None:
    """A user of a large model could not tell which part is wrong, and a later segment would be blamed for an earlier one."""
    loaded, directory = exported
    copy = Path(shutil.copytree(directory, tmp_path / "bundle"))
    file = copy / "onnx" / "cpu.segment_0.onnx"
    model = onnx.load(file, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "GroupQueryAttention").attribute[2].f *= 1.01
    onnx.save(model, file)
    failed = [check for check in check_bundle(loaded, copy, "fp32") if not check.passed]
    assert [check.graph for check in failed if isinstance(check, GraphCheck)] == ["segment_0"]
    assert str(failed[0]).startswith("segment_0 (layers 0 to 1): ")


def test_decoding_is_compared_with_the_prompt_pass(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone do not read what earlier steps wrote into the caches."""
    place = StepPositions.place

    def late(positions: StepPositions, cached: Sequence[int], offsets: Sequence[int]) -> None:
        place(positions, [max(0, slots - 1) for slots in cached], offsets)

    monkeypatch.setattr(StepPositions, "place", late)
    with pytest.raises(VerificationError, match="segment_0, token by token"):
        verify_bundle(*exported, "fp32")


def test_divergence_is_that_of_the_distributions() -> None:
    """The bound on int8 activations would pass nonsense, or refuse what differs by a constant only."""
    logits = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    other = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)) + np.float32(3)
    assert mean_divergence(logits, other) == pytest.approx(0.5 * (0.5 * np.log(2) + 0.5 * np.log(2 / 3)), abs=1e-6)
    assert mean_divergence(logits, logits) == 0


def test_a_large_matrix_is_made_in_parts(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a 7B takes 2 GB in fp32; parts with the wrong rows would refuse every bundle of such a model."""
    _, directory = exported
    manifest = read_manifest(directory)
    first, last = (directory / manifest.targets["cpu"].graphs[segment.name] for segment in manifest.segments)
    run = text_pass.TextPass(manifest, [[1, 2, 3, 4], [5, 6]])
    states = run.run(text_pass.open_session(first, exact=True))
    whole = run.run(text_pass.open_session(last, exact=True), states)
    monkeypatch.setattr(text_pass, "_DENSE_BYTES", 4096)
    parts = text_pass.open_session(last, exact=True)
    np.testing.assert_allclose(run.run(parts, states), whole, rtol=1e-5, atol=1e-6)
    graph = onnx.load(last, load_external_data=False).graph
    products = sum(node.op_type == "MatMulNBits" for node in graph.node)
    text_pass._in_row_parts(graph)
    assert sum(node.op_type == "MatMulNBits" for node in graph.node) > products + 4
