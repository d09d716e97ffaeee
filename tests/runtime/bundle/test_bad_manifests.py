"""Manifests that are broken, of another version, or contradict themselves are refused at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runtime.bundle.corruption import WEIGHTS, Corruption, Corruptions, edit
from tide_runtime import EngineOptions
from tide_runtime.bundle.manifest import SCHEMA_VERSION
from tide_runtime.errors import BundleError, TargetError

corruption = Corruptions()


# --- The directory and the manifest's text


@corruption(BundleError, "is not a directory")
def missing_directory(bundle: Path) -> Path:
    return bundle / "nowhere"


@corruption(BundleError, "is not a directory")
def a_file_instead_of_a_directory(bundle: Path) -> Path:
    return bundle / "manifest.json"


@corruption(BundleError, "manifest.json", "not a TIDE bundle")
def no_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


@corruption(BundleError, "manifest.json", "not a TIDE bundle")
def manifest_is_a_directory(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").mkdir()


@corruption(BundleError, "not JSON")
def empty_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("")


@corruption(BundleError, "not JSON")
def truncated_manifest(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text[: len(text) // 2])


@corruption(BundleError, "holds list", "an object")
def manifest_is_a_list(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("[1, 2]")


@corruption(BundleError, "not UTF-8")
def manifest_is_not_utf8(bundle: Path) -> None:
    (bundle / "manifest.json").write_bytes(b'{"schema": "\xff\xfe"}')


@corruption(BundleError, "not JSON")
def manifest_nests_without_end(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("[" * 200_000)


@corruption(BundleError, "not JSON")
def manifest_has_a_number_of_ten_thousand_digits(bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"schema": ' + "1" * 10_000 + "}")


# --- The schema


@corruption(BundleError, "schema", "missing")
def missing_schema(bundle: Path) -> None:
    edit(bundle, "schema", remove=True)


@corruption(BundleError, f"schema {SCHEMA_VERSION + 1}", "upgrade tide-llm")
def newer_schema(bundle: Path) -> None:
    edit(bundle, "schema", value=SCHEMA_VERSION + 1)
    edit(bundle, "novelty", value={})  # a newer schema may have unknown fields; the error must name the version


@corruption(BundleError, "schema 0", "export the model again")
def older_schema(bundle: Path) -> None:
    edit(bundle, "schema", value=0)


@corruption(BundleError, "do not pad attention", "export the bundle again")
def graphs_of_versions_before_the_first_release(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "passes", "pad_attention", remove=True)


@corruption(BundleError, "schema", "not a number")
def schema_as_text(bundle: Path) -> None:
    edit(bundle, "schema", value="1")


@corruption(BundleError, "schema")
def schema_as_boolean(bundle: Path) -> None:
    edit(bundle, "schema", value=True)


# --- Fields


@corruption(BundleError, "unknown fields", "surprise")
def unknown_field(bundle: Path) -> None:
    edit(bundle, "surprise", value=1)


@corruption(BundleError, "manifest.graphs[1]", "unknown fields", "router")
def unknown_nested_field(bundle: Path) -> None:
    edit(bundle, "graphs", 1, "router", value=1)


@corruption(BundleError, "lacks ['layers']")
def missing_field(bundle: Path) -> None:
    edit(bundle, "layers", remove=True)


@corruption(BundleError, "manifest.model lacks ['num_layers']")
def missing_nested_field(bundle: Path) -> None:
    edit(bundle, "model", "num_layers", remove=True)


@corruption(BundleError, "max_seq_len", "'64'", "expected int")
def number_as_text(bundle: Path) -> None:
    edit(bundle, "max_seq_len", value="64")


@corruption(BundleError, "manifest.layers is an object", "expected a list")
def object_instead_of_list(bundle: Path) -> None:
    edit(bundle, "layers", value={})


@corruption(BundleError, "manifest.model is null", "expected an object")
def null_instead_of_object(bundle: Path) -> None:
    edit(bundle, "model", value=None)


@corruption(BundleError, "manifest.layers[0].kv.heads", "2.5", "expected int")
def fraction_of_a_head(bundle: Path) -> None:
    edit(bundle, "layers", 0, "kv", "heads", value=2.5)


@corruption(BundleError, "files.onnx/weights.bin.bytes", "True")
def boolean_file_size(bundle: Path) -> None:
    edit(bundle, "files", WEIGHTS, "bytes", value=True)


@corruption(BundleError, "generation.temperature", "'hot'")
def temperature_as_text(bundle: Path) -> None:
    edit(bundle, "generation", "temperature", value="hot")


# --- Values that contradict each other


@corruption(BundleError, "dtype is 'fp8'", "fp32, fp16, bf16")
def unknown_dtype(bundle: Path) -> None:
    edit(bundle, "dtype", value="fp8")


@corruption(BundleError, "kv_dtype is 'int3'", "int8")
def unknown_kv_dtype(bundle: Path) -> None:
    edit(bundle, "kv_dtype", value="int3")


@corruption(BundleError, "max_seq_len is 0")
def no_cache_slots(bundle: Path) -> None:
    edit(bundle, "max_seq_len", value=0)


@corruption(BundleError, "max_seq_len is -5")
def negative_cache_slots(bundle: Path) -> None:
    edit(bundle, "max_seq_len", value=-5)


@corruption(BundleError, "max_seq_len is 4096", "128 positions")
def more_cache_slots_than_positions(bundle: Path) -> None:
    edit(bundle, "max_seq_len", value=4096)


@corruption(BundleError, "-4")
def negative_number_of_layers(bundle: Path) -> None:
    edit(bundle, "model", "num_layers", value=-4)


@corruption(BundleError, "there are 3 layers", "the model has 4")
def a_layer_too_few(bundle: Path) -> None:
    edit(bundle, "layers", 3, remove=True)


@corruption(BundleError, "layer 1 has a state of kind 'convolution' and shape [4]")
def a_convolution_without_width(bundle: Path) -> None:
    edit(bundle, "layers", 1, "states", value=[{"kind": "convolution", "shape": [4]}])


@corruption(BundleError, "layer 1 reads the keys of layer 2, which has none before it")
def keys_of_a_later_layer(bundle: Path) -> None:
    edit(bundle, "layers", 1, value={"kv_source": 2})


@corruption(BundleError, "vocab_size must be at least 1")
def no_vocabulary(bundle: Path) -> None:
    edit(bundle, "model", "vocab_size", value=0)


@corruption(BundleError, "do not follow from the checkpoints [3, 1]")
def checkpoints_not_rising(bundle: Path) -> None:
    edit(bundle, "checkpoints", value=[3, 1])


@corruption(BundleError, "do not follow from the checkpoints [2, 3]")
def checkpoints_of_other_segments(bundle: Path) -> None:
    edit(bundle, "checkpoints", value=[2, 3])


@corruption(BundleError, "do not follow from the checkpoints")
def segments_out_of_order(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    edit(bundle, "graphs", value=list(reversed(manifest["graphs"])))


@corruption(BundleError, "two graphs have the same name")
def duplicate_graph_name(bundle: Path) -> None:
    edit(bundle, "graphs", 1, "name", value="segment_0")


@corruption(BundleError, "head is missing")
def no_head(bundle: Path) -> None:
    edit(bundle, "graphs", 3, remove=True)


@corruption(BundleError, "an unknown graph: embed")
def unknown_graph(bundle: Path) -> None:
    graphs = json.loads((bundle / "manifest.json").read_text())["graphs"]
    edit(bundle, "graphs", value=[*graphs, {**graphs[3], "name": "embed"}])


# --- Exits


def add_exits(bundle: Path, *exits: dict[str, Any], draft_limit: int = 4) -> None:
    """Give the bundle (cut after layers 1 and 3 of 4) a calibration with these exits; unnamed fields have right values."""
    whole = [{"checkpoint": 1, "head": "identity", "router": "max_probability", "exact_threshold": 0.5} | e for e in exits]
    edit(bundle, "calibration", value={"exits": whole, "draft_limit": draft_limit, "recommended": "exact"})


@corruption(BundleError, "exits at [2]", "checkpoints [1, 3]")
def an_exit_where_nothing_is_cut(bundle: Path) -> None:
    add_exits(bundle, {"checkpoint": 2})


@corruption(BundleError, "exits at [3, 1]")
def exits_not_rising(bundle: Path) -> None:
    add_exits(bundle, {"checkpoint": 3}, {"checkpoint": 1})


@corruption(BundleError, "exits[1]", "exit_threshold is 1.5", "0 … 1")
def a_threshold_above_one(bundle: Path) -> None:
    add_exits(bundle, {}, {"checkpoint": 3, "exit_threshold": 1.5})


@corruption(BundleError, "exits[0]", "exact_threshold is nan")
def a_threshold_that_is_no_number(bundle: Path) -> None:
    add_exits(bundle, {"exact_threshold": float("nan")})


@corruption(BundleError, "head is 'block:2'", "tail:k")
def an_unknown_exit_head(bundle: Path) -> None:
    add_exits(bundle, {"head": "block:2"})


@corruption(BundleError, "router is 'oracle'", "max_probability")
def an_unknown_router(bundle: Path) -> None:
    add_exits(bundle, {"router": "oracle"})


@corruption(BundleError, "no mlp_threshold")
def two_routers_with_one_threshold(bundle: Path) -> None:
    add_exits(bundle, {"router": "mlp+max_probability"})


@corruption(BundleError, "manifest.calibration", "draft_limit is -1")
def a_negative_draft_limit(bundle: Path) -> None:
    add_exits(bundle, {}, draft_limit=-1)


@corruption(BundleError, "manifest.calibration", "1 and 2 layers")
def tails_of_two_lengths(bundle: Path) -> None:
    add_exits(bundle, {"head": "tail:2"}, {"checkpoint": 3, "head": "tail:1"})


@corruption(BundleError, "manifest.calibration", "0 and 2 layers", "leaves no keys and values")
def exits_with_and_without_a_tail(bundle: Path) -> None:
    add_exits(bundle, {"head": "identity"}, {"checkpoint": 2, "head": "tail:2"})


@corruption(BundleError, "tail:2", "is not the last segment")
def a_tail_that_is_no_segment(bundle: Path) -> None:
    add_exits(bundle, {"head": "tail:2"})


@corruption(BundleError, "the graphs exit_1 are missing")
def an_exit_without_its_graph(bundle: Path) -> None:
    add_exits(bundle, {"head": "linear"})


# --- Targets


@corruption(BundleError, "target cpu lacks graphs ['segment_1']")
def target_lacks_a_graph(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "graphs", "segment_1", remove=True)


@corruption(TargetError, "'abacus'", "onnxruntime-cpu", "upgrade tide-llm", options=EngineOptions(target="cpu"))
def unknown_backend(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "backend", value="abacus")


@corruption(TargetError, "no target 'tpu'", "it has: cpu, cuda", "--target tpu", options=EngineOptions(target="tpu"))
def a_target_the_bundle_has_not(bundle: Path) -> None:
    pass


@corruption(TargetError, "It has: no target", "tide-export")
def no_targets_at_all(bundle: Path) -> None:
    edit(bundle, "targets", value={})


@pytest.mark.parametrize("case", corruption.cases, ids=lambda case: case.name)
def test_a_bad_manifest_is_refused_with_the_fix(case: Corruption, bundle_copy: Path) -> None:
    """A bundle would be run as something else than it is."""
    case.check_refused(bundle_copy)
