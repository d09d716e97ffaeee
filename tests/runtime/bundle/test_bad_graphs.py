"""Graphs that match their hash and are still wrong are refused at load."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from runtime.bundle.corruption import LAST, PICKLE_MARK, SEGMENT, WEIGHTS, Corruption, Corruptions, edit, rename_tensor, sign
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.errors import BundleError

corruption = Corruptions()


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@corruption(BundleError, "cannot load", SEGMENT)
def garbage_signed_as_graph(bundle: Path) -> None:
    (bundle / SEGMENT).write_bytes(b"not an ONNX graph" * 100)
    sign(bundle, SEGMENT)


@corruption(BundleError, "cannot load", SEGMENT)
def cut_off_graph_signed_anew(bundle: Path) -> None:
    (bundle / SEGMENT).write_bytes((bundle / SEGMENT).read_bytes()[:3000])
    sign(bundle, SEGMENT)


@corruption(BundleError, SEGMENT, "inputs that segment_1 needs", "hidden", "stranger")
def graph_with_another_input(bundle: Path) -> None:
    rename_tensor(bundle, SEGMENT, "hidden", "stranger")


@corruption(BundleError, LAST, "outputs that segment_2 needs", "logits")
def graph_with_another_output(bundle: Path) -> None:
    rename_tensor(bundle, LAST, "logits", "scores")


@corruption(BundleError, "segment_2", "inputs", "key_cache")
def graphs_swapped(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "graphs", "segment_0", value="onnx/cpu.segment_2.onnx")


@corruption(BundleError, "inputs that segment_1 needs", "hidden", "stranger")
def manifest_lists_other_inputs(bundle: Path) -> None:
    names = [tensor["name"] for tensor in json.loads((bundle / "manifest.json").read_text())["graphs"][1]["inputs"]]
    edit(bundle, "graphs", 1, "inputs", names.index("hidden"), "name", value="stranger")


@corruption(BundleError, "key_cache_0", "shape", "do not belong together")
def more_kv_heads_than_the_graph_has(bundle: Path) -> None:
    edit(bundle, "layers", 0, "kv", "heads", value=8)


@corruption(BundleError, "hidden_out", "shape", "48")
def another_hidden_size(bundle: Path) -> None:
    edit(bundle, "model", "hidden_size", value=48)


@corruption(BundleError, "logits", "shape", "5000")
def another_vocabulary_size(bundle: Path) -> None:
    edit(bundle, "model", "vocab_size", value=5000)


@corruption(BundleError, "cannot load")
def a_pickle_in_place_of_the_weights(bundle: Path) -> None:
    (bundle / WEIGHTS).write_bytes(pickle.dumps(Bomb(bundle.parent / PICKLE_MARK)))
    sign(bundle, WEIGHTS)


@corruption(BundleError, "cannot load", SEGMENT)
def a_pickle_in_place_of_a_graph(bundle: Path) -> None:
    (bundle / SEGMENT).write_bytes(pickle.dumps(Bomb(bundle.parent / PICKLE_MARK)))
    sign(bundle, SEGMENT)


@corruption(BundleError, "cannot load", SEGMENT)
def graph_with_weights_outside_the_bundle(bundle: Path) -> None:
    shutil.copy(bundle / WEIGHTS, bundle.parent / "weights.bin")
    model = onnx.load(bundle / SEGMENT, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../weights.bin" if entry.key == "location" else entry.value
    onnx.save(model, bundle / SEGMENT)
    sign(bundle, SEGMENT)


@pytest.mark.parametrize("case", corruption.cases, ids=lambda case: case.name)
def test_a_bad_graph_is_refused_with_the_fix(case: Corruption, bundle_copy: Path) -> None:
    """Garbage would be computed, or code of a stranger would run."""
    case.check_refused(bundle_copy)


def test_the_unharmed_copy_loads(bundle_copy: Path) -> None:
    """Guards against tests that pass because the unmodified copy is broken."""
    with Engine.load(bundle_copy, EngineOptions(threads=ThreadOptions(1))) as engine:
        assert len(engine.generate([5, 6], GenerationParams(max_new_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_cache_longer_than_the_rotary_tables_is_an_error_not_garbage(bundle_copy: Path) -> None:
    """Guards against garbage after position 64, when the manifest promises 100 positions but the graphs were compiled for 64."""
    edit(bundle_copy, "max_seq_len", value=100)
    with pytest.raises(BundleError, match="export the bundle again"):
        engine = Engine.load(bundle_copy, EngineOptions(threads=ThreadOptions(1)))
        engine.generate([5] * 80, GenerationParams(max_new_tokens=2))
