"""Bundles that are broken, of another version, or contradict themselves are refused at load, with the fix."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from cli_in_process import Run
from edited_bundle import edit, manifest_of, sign
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions, TideError
from tide_runtime.bundle.manifest import SCHEMA_VERSION, UNCUT
from tide_runtime.errors import BundleError, TargetError

FIXES = ("export", "tide-export", "upgrade", "copy", "add it", "do not load", "give the folder")
WEIGHTS, SEGMENT, LAST, HEAD = "onnx/weights.bin", *(f"onnx/cpu.{name}.onnx" for name in ("segment_1", "segment_2", "head"))
TOKENIZER, TEMPLATE = "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"
ONE_THREAD = EngineOptions(threads=ThreadOptions(1))
PICKLE_MARK = "unpickled"
Harm = Callable[[Path], Any]


@pytest.fixture
def bundle_copy(bundle_copy: Path) -> Path:
    """A copy whose segments are loaded eagerly, as in a bundle with exits."""
    edit(bundle_copy, "targets", "cpu", "graphs", UNCUT, remove=True)
    return bundle_copy


def sets(*path: str | int, value: Any) -> Harm:
    return lambda bundle: edit(bundle, *path, value=value)


def drops(*path: str | int) -> Harm:
    return lambda bundle: edit(bundle, *path, remove=True)


def manifest_text(change: Callable[[str], str | bytes]) -> Harm:
    """The manifest's file holds what ``change`` makes of its text."""

    def harm(bundle: Path) -> None:
        changed = change((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_bytes(changed.encode() if isinstance(changed, str) else changed)

    return harm


def without(name: str, then: Callable[[Path], object] = lambda file: None) -> Harm:
    """Without the file ``name``, and ``then`` something else in its place."""

    def harm(bundle: Path) -> None:
        (bundle / name).unlink()
        then(bundle / name)

    return harm


def content(name: str, change: Callable[[bytes], bytes], signed: bool = True) -> Harm:
    """Change a file; ``signed``: its hash and size in the manifest too."""

    def harm(bundle: Path) -> None:
        changed = change((bundle / name).read_bytes())
        (bundle / name).write_bytes(changed)
        if signed:
            sign(bundle, name)

    return harm


def flipped(held: bytes) -> bytes:
    return held[: len(held) // 2] + bytes([held[len(held) // 2] ^ 1]) + held[len(held) // 2 + 1 :]


def listed(path: str) -> Harm:
    """The head's graph stands at ``path``, as the manifest says."""

    def harm(bundle: Path) -> None:
        edit(bundle, "files", path, value=manifest_of(bundle)["files"][HEAD])
        edit(bundle, "targets", "cpu", "graphs", "head", value=path)

    return harm


def linked_out(bundle: Path) -> None:
    shutil.move(bundle / HEAD, bundle.parent / "head.onnx")
    (bundle / HEAD).symlink_to(bundle.parent / "head.onnx")


def renamed(file: str, old: str, new: str) -> Harm:
    """A tensor of a graph has another name."""

    def change(held: bytes) -> bytes:
        model = onnx.load_model_from_string(held)
        for value in (*model.graph.input, *model.graph.output):
            value.name = new if value.name == old else value.name
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        return model.SerializeToString()

    return content(file, change)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def pickled(name: str) -> Harm:
    return lambda bundle: content(name, lambda held: pickle.dumps(Bomb(bundle.parent / PICKLE_MARK)))(bundle)


def weights_outside(bundle: Path) -> None:
    shutil.copy(bundle / WEIGHTS, bundle.parent / "weights.bin")

    def change(held: bytes) -> bytes:
        model = onnx.load_model_from_string(held)
        for entry in (entry for tensor in model.graph.initializer for entry in tensor.external_data):
            entry.value = "../../weights.bin" if entry.key == "location" else entry.value
        return model.SerializeToString()

    content(SEGMENT, change)(bundle)


def newer_schema(bundle: Path) -> None:
    edit(bundle, "schema", value=SCHEMA_VERSION + 1)
    edit(bundle, "novelty", value={})  # a newer schema may have unknown fields; the error must name the version


def another_input(bundle: Path) -> None:
    names = [tensor["name"] for tensor in manifest_of(bundle)["graphs"][1]["inputs"]]
    edit(bundle, "graphs", 1, "inputs", names.index("hidden"), "name", value="stranger")


def exits(*exits: dict[str, Any], draft_limit: int = 4) -> Harm:
    """The bundle (cut after layers 1 and 3 of 4) has a calibration with these exits; unnamed fields have right values."""
    whole = [{"checkpoint": 1, "head": "identity", "router": "max_probability", "exact_threshold": 0.5} | e for e in exits]
    return sets("calibration", value={"exits": whole, "draft_limit": draft_limit, "recommended": "exact"})


@dataclass(frozen=True)
class Bad:
    """``harm`` changes the copied bundle; if it returns a path, that is loaded instead. ``words``: of the error's message."""

    harm: Harm
    words: tuple[str, ...]
    error: type[TideError] = BundleError
    options: EngineOptions = ONE_THREAD


def bad(harm: Harm, *words: str, **more: Any) -> Bad:
    return Bad(harm, words, **more)


BAD = {
    # the folder, and the manifest's text
    "missing folder": bad(lambda bundle: bundle / "nowhere", "is not a directory"),
    "file for a folder": bad(lambda bundle: bundle / "manifest.json", "is not a directory"),
    "no manifest": bad(without("manifest.json"), "manifest.json", "not a TIDE bundle"),
    "manifest is a folder": bad(without("manifest.json", Path.mkdir), "manifest.json", "not a TIDE bundle"),
    "truncated manifest": bad(manifest_text(lambda text: text[: len(text) // 2]), "not JSON"),
    "manifest is a list": bad(manifest_text(lambda text: "[1, 2]"), "holds list", "an object"),
    "not UTF-8": bad(manifest_text(lambda text: b'{"schema": "\xff\xfe"}'), "not UTF-8"),
    "nests without end": bad(manifest_text(lambda text: "[" * 200_000), "not JSON"),
    "number of 10,000 digits": bad(manifest_text(lambda text: '{"schema": ' + "1" * 10_000 + "}"), "not JSON"),
    # the schema
    "missing schema": bad(drops("schema"), "schema", "missing"),
    "newer schema": bad(newer_schema, f"schema {SCHEMA_VERSION + 1}", "upgrade tide-llm"),
    "older schema": bad(sets("schema", value=0), "schema 0", "export the model again"),
    "before the first release": bad(
        drops("targets", "cpu", "passes", "pad_attention"), "do not pad attention", "export the bundle again"
    ),
    "schema as text": bad(sets("schema", value="1"), "schema", "not a number"),
    # fields
    "unknown field": bad(sets("surprise", value=1), "unknown fields", "surprise"),
    "unknown nested field": bad(sets("graphs", 1, "router", value=1), "manifest.graphs[1]", "unknown fields", "router"),
    "missing field": bad(drops("layers"), "lacks ['layers']"),
    "number as text": bad(sets("max_seq_len", value="64"), "max_seq_len", "'64'", "expected int"),
    "object for a list": bad(sets("layers", value={}), "manifest.layers is an object", "expected a list"),
    "null for an object": bad(sets("model", value=None), "manifest.model is null", "expected an object"),
    "fraction of a head": bad(sets("layers", 0, "kv", "heads", value=2.5), "manifest.layers[0].kv.heads", "2.5", "expected int"),
    "boolean size": bad(sets("files", WEIGHTS, "bytes", value=True), "files.onnx/weights.bin.bytes", "True"),
    "temperature as text": bad(sets("generation", "temperature", value="hot"), "generation.temperature", "'hot'"),
    "token as object": bad(
        sets("tokenizer", "special_tokens", "bos_token", value={"content": "<s>"}),
        "tokenizer.special_tokens.bos_token",
        "an object",
    ),
    # values that contradict each other
    "unknown dtype": bad(sets("dtype", value="fp8"), "dtype is 'fp8'", "fp32, fp16, bf16"),
    "unknown kv_dtype": bad(sets("kv_dtype", value="int3"), "kv_dtype is 'int3'", "int8"),
    "no slots": bad(sets("max_seq_len", value=0), "max_seq_len is 0"),
    "more slots than positions": bad(sets("max_seq_len", value=4096), "max_seq_len is 4096", "128 positions"),
    "a layer too few": bad(drops("layers", 3), "there are 3 layers", "the model has 4"),
    "convolution without width": bad(
        sets("layers", 1, "states", value=[{"kind": "convolution", "shape": [4]}]),
        "layer 1 has a state of kind 'convolution' and shape [4]",
    ),
    "keys of a later layer": bad(
        sets("layers", 1, value={"kv_source": 2}), "layer 1 reads the keys of layer 2, which has none before it"
    ),
    "no vocabulary": bad(sets("model", "vocab_size", value=0), "vocab_size must be at least 1"),
    "checkpoints not rising": bad(sets("checkpoints", value=[3, 1]), "do not follow from the checkpoints [3, 1]"),
    "other checkpoints": bad(sets("checkpoints", value=[2, 3]), "do not follow from the checkpoints [2, 3]"),
    "two of one name": bad(sets("graphs", 1, "name", value="segment_0"), "two graphs have the same name"),
    "no head": bad(drops("graphs", 3), "head is missing"),
    "unknown graph": bad(
        lambda b: edit(b, "graphs", value=[*(of := manifest_of(b)["graphs"]), {**of[3], "name": "embed"}]),
        "an unknown graph: embed",
    ),
    # exits
    "exit without a cut": bad(exits({"checkpoint": 2}), "exits at [2]", "checkpoints [1, 3]"),
    "exits not rising": bad(exits({"checkpoint": 3}, {"checkpoint": 1}), "exits at [3, 1]"),
    "threshold above one": bad(exits({}, {"checkpoint": 3, "exit_threshold": 1.5}), "exits[1]", "exit_threshold is 1.5", "0 … 1"),
    "threshold is no number": bad(exits({"exact_threshold": float("nan")}), "exits[0]", "exact_threshold is nan"),
    "unknown exit head": bad(exits({"head": "block:2"}), "head is 'block:2'", "tail:k"),
    "unknown router": bad(exits({"router": "oracle"}), "router is 'oracle'", "max_probability"),
    "two routers, one threshold": bad(exits({"router": "mlp+max_probability"}), "no mlp_threshold"),
    "negative draft limit": bad(exits({}, draft_limit=-1), "manifest.calibration", "draft_limit is -1"),
    "tails of two lengths": bad(
        exits({"head": "tail:2"}, {"checkpoint": 3, "head": "tail:1"}), "manifest.calibration", "1 and 2 layers"
    ),
    "exits with and without a tail": bad(
        exits({"head": "identity"}, {"checkpoint": 2, "head": "tail:2"}), "0 and 2 layers", "leaves no keys and values"
    ),
    "tail is no segment": bad(exits({"head": "tail:2"}), "tail:2", "is not the last segment"),
    "exit without its graph": bad(exits({"head": "linear"}), "the graphs exit_1 are missing"),
    # targets
    "target lacks a graph": bad(drops("targets", "cpu", "graphs", "segment_1"), "target cpu lacks graphs ['segment_1']"),
    "unknown backend": bad(
        sets("targets", "cpu", "backend", value="abacus"),
        *("'abacus'", "onnxruntime-cpu", "upgrade tide-llm"),
        error=TargetError,
        options=EngineOptions(target="cpu"),
    ),
    "unknown target": bad(
        lambda bundle: None,
        *("no target 'tpu'", "it has: cpu, cuda", "--target tpu"),
        error=TargetError,
        options=EngineOptions(target="tpu"),
    ),
    "no targets": bad(sets("targets", value={}), "It has: no target", "tide-export", error=TargetError),
    # files
    "missing weights": bad(without(WEIGHTS), WEIGHTS, "is missing"),
    "truncated weights": bad(content(WEIGHTS, lambda held: held[:1000], signed=False), WEIGHTS, "bytes", "truncated"),
    "truncated weights, signed": bad(content(WEIGHTS, lambda held: held[:1000]), "cannot load onnx/cpu."),
    "bit of the weights": bad(content(WEIGHTS, flipped, signed=False), WEIGHTS, "SHA-256"),
    "bit of the tokenizer": bad(content(TOKENIZER, flipped, signed=False), TOKENIZER, "SHA-256"),
    "grown graph": bad(content(HEAD, lambda held: held + b"\0", signed=False), HEAD, "expected"),
    "folder for a file": bad(without(HEAD, Path.mkdir), HEAD, "is missing"),
    "graph not listed": bad(drops("files", HEAD), HEAD, "not listed under files"),
    "weights not listed": bad(drops("files", WEIGHTS), WEIGHTS, "not listed under files"),
    "missing tokenizer": bad(without(TOKENIZER), TOKENIZER, "is missing"),
    "other kind of tokenizer": bad(
        content(TOKENIZER, lambda held: b'{"version": "1.0", "model": {"type": "Crystal ball"}}'),
        "not a readable tokenizer.json",
    ),
    "missing template": bad(without(TEMPLATE), TEMPLATE, "is missing"),
    "template not UTF-8": bad(content(TEMPLATE, lambda held: b"\xff\xfe\x00"), TEMPLATE, "not UTF-8"),
    # paths that leave the bundle
    "path to the parent": bad(listed("../head.onnx"), "'../head.onnx'", "leaves the bundle"),
    "path through a folder": bad(listed("onnx/../../head.onnx"), "'onnx/../../head.onnx'", "leaves the bundle"),
    "absolute path": bad(listed("/etc/passwd"), "'/etc/passwd'", "leaves the bundle"),
    "backslashes": bad(listed("..\\head.onnx"), "leaves the bundle"),
    "drive": bad(listed("C:head.onnx"), "leaves the bundle"),
    "no file system has it": bad(listed("x" * 5000), "cannot be read"),
    "link out": bad(linked_out, HEAD, "is a link that leaves the bundle"),
    "link to itself": bad(without(HEAD, lambda file: file.symlink_to(file)), HEAD, "cannot be read"),
    # graphs that match their hash
    "garbage": bad(content(SEGMENT, lambda held: b"not an ONNX graph" * 100), "cannot load", SEGMENT),
    "cut off": bad(content(SEGMENT, lambda held: held[:3000]), "cannot load", SEGMENT),
    "another input": bad(renamed(SEGMENT, "hidden", "stranger"), SEGMENT, "inputs that segment_1 needs", "hidden", "stranger"),
    "another output": bad(renamed(LAST, "logits", "scores"), LAST, "outputs that segment_2 needs", "logits"),
    "graphs swapped": bad(
        sets("targets", "cpu", "graphs", "segment_0", value="onnx/cpu.segment_2.onnx"), "segment_2", "inputs", "key_cache"
    ),
    "manifest of other inputs": bad(another_input, "inputs that segment_1 needs", "hidden", "stranger"),
    "more heads": bad(sets("layers", 0, "kv", "heads", value=8), "key_cache_0", "shape", "do not belong together"),
    "another hidden size": bad(sets("model", "hidden_size", value=48), "head", "64", "48"),
    "another vocabulary": bad(sets("model", "vocab_size", value=5000), "logits", "shape", "5000"),
    "pickled weights": bad(pickled(WEIGHTS), "cannot load"),
    "pickled graph": bad(pickled(SEGMENT), "cannot load", SEGMENT),
    "weights outside": bad(weights_outside, "cannot load", SEGMENT),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_bundle_is_refused_with_the_fix(name: str, bundle_copy: Path) -> None:
    """A bundle would be run as something else than it is, give garbage, have other files read, or run a stranger's code."""
    case = BAD[name]
    directory = case.harm(bundle_copy) or bundle_copy
    with pytest.raises(TideError) as caught:
        Engine.load(directory, case.options)
    message = str(caught.value)
    assert type(caught.value) is case.error, message
    assert all(word in message for word in case.words), message
    assert any(fix in message.lower() for fix in FIXES), message
    assert not (bundle_copy.parent / PICKLE_MARK).exists(), "a pickled file was executed"


# tide-inspect shows the manifest and opens no graph, so it does not detect broken ones.
SEEN_BY_BOTH = ("no manifest", "newer schema", "bit of the weights", "path to the parent")


@pytest.mark.parametrize(("module", "name"), [*((m, n) for m in ("run", "inspect") for n in SEEN_BY_BOTH), ("run", "garbage")])
def test_the_commands_end_with_one_message_and_exit_code_2(module: str, name: str, bundle_copy: Path, command: Run) -> None:
    """A script would go on, or a user see a traceback."""
    BAD[name].harm(bundle_copy)
    done = command(module, bundle_copy, *(["def"] if module == "run" else []))
    assert done.code == 2 and done.out == "" and "Traceback" not in done.err
    assert done.err.startswith("error: ") and all(w in done.err for w in BAD[name].words)


def test_without_verification_sizes_are_still_checked(bundle_copy: Path) -> None:
    """A download that stopped half way would be loaded, or hashes of gigabytes compared unasked."""
    options = EngineOptions(threads=ThreadOptions(1), verify=False)
    content(WEIGHTS, flipped, signed=False)(bundle_copy)
    with Engine.load(bundle_copy, options) as engine:
        assert len(engine.generate([5, 6], GenerationParams(max_new_tokens=2, ignore_eos=True))[0].token_ids) == 2
    BAD["truncated weights"].harm(bundle_copy)
    with pytest.raises(BundleError, match="truncated"):
        Engine.load(bundle_copy, options)


def test_a_cache_longer_than_the_rotary_tables_is_an_error_not_garbage(bundle_copy: Path) -> None:
    """Guards against garbage after position 64, when the manifest promises 100 positions but the graphs were compiled for 64."""
    edit(bundle_copy, "max_seq_len", value=100)
    with pytest.raises(BundleError, match="export the bundle again"):
        engine = Engine.load(bundle_copy, ONE_THREAD)
        engine.generate([5] * 80, GenerationParams(max_new_tokens=2))
