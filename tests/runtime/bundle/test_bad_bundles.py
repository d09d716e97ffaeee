"""Broken, foreign or hostile bundles are refused at load, with an error that says what to do."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions, TideError
from tide_runtime.bundle.manifest import SCHEMA_VERSION, UNCUT
from tide_runtime.errors import BundleError, TargetError

FIXES = ("export", "tide-export", "upgrade", "copy", "add it", "do not load", "give the folder")
WEIGHTS, SEGMENT, LAST, HEAD = "onnx/weights.bin", *(f"onnx/cpu.{name}.onnx" for name in ("segment_1", "segment_2", "head"))
TOKENIZER, TEMPLATE = "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"
PICKLE_MARK = "unpickled"


@dataclass(frozen=True)
class Corruption:
    """``harm`` changes the copied bundle; if it returns a path, that is loaded instead."""

    name: str
    harm: Callable[[Path], Path | None]
    error: type[TideError]
    words: tuple[str, ...]
    options: EngineOptions | None = None


CORRUPTIONS: list[Corruption] = []


def corruption(
    error: type[TideError], *words: str, options: EngineOptions | None = None
) -> Callable[[Callable[[Path], Path | None]], Callable[[Path], Path | None]]:
    def register(harm: Callable[[Path], Path | None]) -> Callable[[Path], Path | None]:
        CORRUPTIONS.append(Corruption(harm.__name__, harm, error, words, options))
        return harm

    return register


def edit(bundle: Path, *path: str | int, value: Any = None, remove: bool = False) -> None:
    """Set or remove one value of the manifest."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def sign(bundle: Path, name: str) -> None:
    """Update the manifest's hash and size of a changed file."""
    content = (bundle / name).read_bytes()
    edit(bundle, "files", name, value={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)})


def rename_tensor(bundle: Path, file: str, old: str, new: str) -> None:
    model = onnx.load(bundle / file, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    onnx.save(model, bundle / file)
    sign(bundle, file)


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


@corruption(TargetError, "'abacus'", "onnxruntime-cpu", "upgrade tide-llm")
def unknown_backend(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "backend", value="abacus")


@corruption(TargetError, "no target 'tpu'", "it has: cpu, cuda", "--target tpu", options=EngineOptions(target="tpu"))
def a_target_the_bundle_has_not(bundle: Path) -> None:
    pass


@corruption(TargetError, "It has: no target", "tide-export")
def no_targets_at_all(bundle: Path) -> None:
    edit(bundle, "targets", value={})


# --- Files


@corruption(BundleError, WEIGHTS, "is missing")
def missing_weights(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()


@corruption(BundleError, WEIGHTS, "bytes", "truncated")
def truncated_weights(bundle: Path) -> None:
    with (bundle / WEIGHTS).open("r+b") as file:
        file.truncate(1000)


@corruption(BundleError, "cannot load onnx/cpu.", options=EngineOptions(threads=ThreadOptions(1)))
def truncated_weights_signed_anew(bundle: Path) -> None:
    truncated_weights(bundle)
    sign(bundle, WEIGHTS)


@corruption(BundleError, WEIGHTS, "SHA-256")
def flipped_bit_in_the_weights(bundle: Path) -> None:
    flip(bundle / WEIGHTS)


@corruption(BundleError, SEGMENT, "SHA-256")
def flipped_bit_in_a_graph(bundle: Path) -> None:
    flip(bundle / SEGMENT)


@corruption(BundleError, TOKENIZER, "SHA-256")
def flipped_bit_in_the_tokenizer(bundle: Path) -> None:
    flip(bundle / TOKENIZER)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@corruption(BundleError, HEAD, "expected")
def a_graph_that_grew(bundle: Path) -> None:
    with (bundle / HEAD).open("ab") as file:
        file.write(b"\0")


@corruption(BundleError, HEAD, "is missing")
def a_directory_in_place_of_a_file(bundle: Path) -> None:
    (bundle / HEAD).unlink()
    (bundle / HEAD).mkdir()


@corruption(BundleError, HEAD, "not listed under files")
def graph_file_not_listed(bundle: Path) -> None:
    edit(bundle, "files", HEAD, remove=True)


@corruption(BundleError, WEIGHTS, "not listed under files")
def weights_not_listed(bundle: Path) -> None:
    edit(bundle, "files", WEIGHTS, remove=True)


# --- Paths that leave the bundle


def list_path(bundle: Path, path: str) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    edit(bundle, "files", path, value=manifest["files"][HEAD])
    edit(bundle, "targets", "cpu", "graphs", "head", value=path)


@corruption(BundleError, "'../head.onnx'", "leaves the bundle")
def path_to_the_parent(bundle: Path) -> None:
    shutil.copy(bundle / HEAD, bundle.parent / "head.onnx")
    list_path(bundle, "../head.onnx")


@corruption(BundleError, "'onnx/../../head.onnx'", "leaves the bundle")
def path_through_a_folder_to_the_parent(bundle: Path) -> None:
    list_path(bundle, "onnx/../../head.onnx")


@corruption(BundleError, "'/etc/passwd'", "leaves the bundle")
def absolute_path(bundle: Path) -> None:
    list_path(bundle, "/etc/passwd")


@corruption(BundleError, "leaves the bundle")
def path_with_backslashes(bundle: Path) -> None:
    list_path(bundle, "..\\head.onnx")


@corruption(BundleError, "leaves the bundle")
def path_with_a_drive(bundle: Path) -> None:
    list_path(bundle, "C:head.onnx")


@corruption(BundleError, HEAD, "is a link that leaves the bundle")
def link_out_of_the_bundle(bundle: Path) -> None:
    shutil.move(bundle / HEAD, bundle.parent / "head.onnx")
    (bundle / HEAD).symlink_to(bundle.parent / "head.onnx")


@corruption(BundleError, HEAD, "cannot be read")
def link_to_itself(bundle: Path) -> None:
    (bundle / HEAD).unlink()
    (bundle / HEAD).symlink_to(bundle / HEAD)


@corruption(BundleError, "cannot be read")
def file_name_no_file_system_has(bundle: Path) -> None:
    list_path(bundle, "x" * 5000)


# --- Graphs that match their hash and are still wrong


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


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@corruption(BundleError, "cannot load", SEGMENT)
def graph_with_weights_outside_the_bundle(bundle: Path) -> None:
    shutil.copy(bundle / WEIGHTS, bundle.parent / "weights.bin")
    model = onnx.load(bundle / SEGMENT, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../weights.bin" if entry.key == "location" else entry.value
    onnx.save(model, bundle / SEGMENT)
    sign(bundle, SEGMENT)


# --- Tokenizer and chat template


@corruption(BundleError, TOKENIZER, "is missing")
def missing_tokenizer(bundle: Path) -> None:
    (bundle / TOKENIZER).unlink()


@corruption(BundleError, "not a readable tokenizer.json")
def tokenizer_of_another_kind(bundle: Path) -> None:
    (bundle / TOKENIZER).write_text('{"version": "1.0", "model": {"type": "Crystal ball"}}')
    sign(bundle, TOKENIZER)


@corruption(BundleError, TEMPLATE, "is missing")
def missing_chat_template(bundle: Path) -> None:
    (bundle / TEMPLATE).unlink()


@corruption(BundleError, TEMPLATE, "not UTF-8")
def chat_template_is_not_utf8(bundle: Path) -> None:
    (bundle / TEMPLATE).write_bytes(b"\xff\xfe\x00")
    sign(bundle, TEMPLATE)


@corruption(BundleError, "tokenizer.special_tokens.bos_token", "an object")
def special_token_as_object(bundle: Path) -> None:
    edit(bundle, "tokenizer", "special_tokens", "bos_token", value={"content": "<s>"})


@pytest.fixture
def bundle_copy(bundle_copy: Path) -> Path:
    """A copy whose segments are loaded eagerly, as in a bundle with exits."""
    edit(bundle_copy, "targets", "cpu", "graphs", UNCUT, remove=True)
    return bundle_copy


@pytest.mark.parametrize("case", CORRUPTIONS, ids=lambda case: case.name)
def test_a_corrupt_bundle_is_refused_with_the_fix(case: Corruption, bundle_copy: Path) -> None:
    directory = case.harm(bundle_copy) or bundle_copy
    with pytest.raises(TideError) as caught:
        Engine.load(directory, case.options or EngineOptions(threads=ThreadOptions(1)))
    message = str(caught.value)
    assert type(caught.value) is case.error, message
    assert all(word in message for word in case.words), message
    assert any(fix in message.lower() for fix in FIXES), message
    assert not (bundle_copy.parent / PICKLE_MARK).exists(), "a pickled file was executed"


def test_there_are_at_least_thirty_distinct_corruptions() -> None:
    assert len({case.name for case in CORRUPTIONS}) == len(CORRUPTIONS) >= 30


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


def test_without_verification_sizes_are_still_checked(bundle_copy: Path) -> None:
    options = EngineOptions(threads=ThreadOptions(1), verify=False)
    flip(bundle_copy / WEIGHTS)
    Engine.load(bundle_copy, options).close()  # verify=False: hashes are not compared
    truncated_weights(bundle_copy)
    with pytest.raises(BundleError, match="truncated"):
        Engine.load(bundle_copy, options)


# tide-inspect shows the manifest and opens no graph, so it does not detect broken ones.
SEEN_BY_BOTH = ["no_manifest", "newer_schema", "flipped_bit_in_the_weights", "path_to_the_parent"]
THROUGH_COMMANDS = [(m, n) for m in ("run", "inspect") for n in SEEN_BY_BOTH] + [("run", "garbage_signed_as_graph")]


@pytest.mark.parametrize(("module", "name"), THROUGH_COMMANDS)
def test_the_commands_end_with_one_message_and_exit_code_2(
    module: str, name: str, bundle_copy: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    case = next(case for case in CORRUPTIONS if case.name == name)
    case.harm(bundle_copy)
    done = command(module, bundle_copy, *(["def"] if module == "run" else []))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {case.error.__name__}: ") and all(w in done.stderr for w in case.words)
    assert "Traceback" not in done.stderr
