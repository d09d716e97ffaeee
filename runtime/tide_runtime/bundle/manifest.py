"""The manifest of a bundle: the schema that the exporter writes and the runtime reads.

The classes are frozen and validated when built from JSON; a value of the wrong type is a BundleError that names the field.
Unknown fields are refused, because they belong to a schema that this runtime does not support.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tide_runtime.bundle.calibration import CalibrationInfo, DraftHeadInfo, ExitInfo
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.bundle.engine_info import EngineInfo, ProfileInfo, TensorInfo
from tide_runtime.bundle.layer_info import STATE_KINDS, KVInfo, LayerInfo, StateInfo
from tide_runtime.errors import BundleError, ParamsError

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
HEAD = "head"  # the LM head for early exits; the last segment includes its own
SCORE = "score_"  # begins the names of graphs that score the logits of `HEAD`, see `score_graph`
UNCUT = "uncut"  # all segments as one graph; optional in a target
LOOP = "loop"  # one loop of a looped model, for rows of any loops; optional in a target
DRAFT = "draft"  # the draft head; optional in a target
ADVANCE = "advance"  # moves all states over the accepted tokens of a step with drafts; in targets of recurrent models
INTEGER_PRODUCTS = "int8 w8a8"  # origin of weights whose products are of integers, see `Manifest.weights`
SMOOTHING_FILE = "onnx/smoothing.safetensors"  # module → what its integer product's input is divided by [K], where not by ones
STATES = "states"  # output of `UNCUT`, where there is a draft head: what that reads of each token; also of `DRAFT`
DTYPES = ("fp32", "fp16", "bf16")
NOT_YET = "not verified yet"  # `TargetInfo.verified` while the exporter compares a bundle that is in use already
PAD_ATTENTION = "pad_attention"  # lowering pass, see `TargetInfo.pads_attention`
KV_DTYPES = (*DTYPES, "int8")


@dataclass(frozen=True)
class ModelInfo:
    """The exported model.

    Args:
        source: directory name or hub id.
        num_layers: that a token runs through; those of a looped model count in each of its ``loops``.
        fingerprint: SHA-256 of the weights.
        loops: how many times the stored layers run.
        exit_threshold: of the model's own exit rule (router ``gate``), the cumulated probability from which on a token leaves.
        code: file → SHA-256 of the code that came with the model and ran at its export; none runs here.
        source_fingerprint: that of the model's files, where the export rounded what it read from them; empty: ``fingerprint``.
    """

    name: str
    source: str
    revision: str | None
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    parameters: int
    max_position_embeddings: int
    fingerprint: str
    loops: int = 1
    exit_threshold: float | None = None
    code: dict[str, str] = field(default_factory=dict)
    source_fingerprint: str = ""


@dataclass(frozen=True)
class GraphInfo:
    """One graph of the segment contract: ``segment_i``, ``exit_c`` or ``head``.

    ``layers``: the range [first, end) of decoder layers that it runs.
    """

    name: str
    layers: list[int] | None  # null unless it is a segment
    parameters: int
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]


@dataclass(frozen=True)
class TargetInfo:
    """The graphs compiled for one kind of machine.

    A target may also have `UNCUT`, which runs all segments in one launch, `LOOP`, and `DRAFT`.

    Args:
        graphs: graph's name → file.
        weights: external weights file of the graphs; None when each file contains its weights, as engines do.
        passes: lowering pass → number of times it was applied.
        compute: compute capabilities, times ten, that the engines were built for.
        tool: package and exact version that built the engines and is required to load them.
        profiles: optimization profiles of the engines, in order.
        engines: graph name → facts of its engine.
        products: file of a graph with one low-bit matrix product of each kind, which the runtime checks; None: there is none.
        verified: the machine on which the target was held to the eager model, as ``on NVIDIA L40``, or ``not verified: `` and the
            reason, or `NOT_YET`; empty in older bundles.
    """

    backend: str
    graphs: dict[str, str]
    weights: str | None
    passes: dict[str, int]
    compute: list[int] = field(default_factory=list)
    tool: str | None = None
    profiles: list[ProfileInfo] = field(default_factory=list)
    engines: dict[str, EngineInfo] = field(default_factory=dict)
    products: str | None = None
    verified: str = ""

    @property
    def pads_attention(self) -> bool:
        """Whether one form serves all steps, and its attention runs rows of padding after each sequence's tokens."""
        return bool(self.passes.get(PAD_ATTENTION))


@dataclass(frozen=True)
class TokenizerInfo:
    """Files and special tokens of the tokenizer. ``special_tokens`` go to the chat template (bos_token, eos_token, …).

    ``tool_chat_template``: the template of chats with tools, where the model has one of its own for them.
    """

    file: str
    chat_template: str | None
    special_tokens: dict[str, str]
    tool_chat_template: str | None = None


@dataclass(frozen=True)
class GenerationInfo:
    """The model's generation defaults. ``suppress_tokens``: ids that it never writes."""

    eos_token_ids: list[int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class HeadInfo:
    """The head of a model with 4-bit layers: its ``bits``, and the model's perplexity on ``text`` with a head of 4 bits and of 8,
    which decided them; None where they were asked for."""

    bits: int
    perplexity_4: float | None = None
    perplexity_8: float | None = None
    text: str = ""


@dataclass(frozen=True)
class RoundingInfo:
    """Perplexity on ``text`` of a model with integer products: with their inputs as they are, in 8 bits, and in 7, which some
    processors need."""

    perplexity: float
    perplexity_8: float
    perplexity_7: float
    text: str


@dataclass(frozen=True)
class FileInfo:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The manifest.

    Args:
        checkpoints: number of layers before each cut between segments.
        calibration: exits and policies; None: not calibrated.
        draft_head: None: there is none.
        files: every file of the bundle except the manifest.
        layers: what each decoder layer keeps of a text.
        weights: format of low-bit matrices → number of them; the others are in ``dtype``.
        head: how many bits the head has, where that was measured or asked for.
        kv_dtype: data type of the KV caches; None: ``dtype``. ``int8``: rounded, with a scale for each channel in the graphs.
        long_rotary_from: texts of more tokens than this are rotated by the long factors of the rotary embedding (LongRoPE): the
            position ids of all their tokens are larger by this number. None: there is one set of factors.
        embedding: of an embedding model; None: it writes text.
    """

    schema: int
    created: str
    tools: dict[str, str]
    model: ModelInfo
    dtype: str
    max_seq_len: int
    checkpoints: list[int]
    layers: list[LayerInfo]
    graphs: list[GraphInfo]
    targets: dict[str, TargetInfo]
    generation: GenerationInfo
    tokenizer: TokenizerInfo | None = None
    calibration: CalibrationInfo | None = None
    files: dict[str, FileInfo] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    kv_dtype: str | None = None
    head: HeadInfo | None = None
    long_rotary_from: int | None = None
    draft_head: DraftHeadInfo | None = None
    embedding: EmbeddingInfo | None = None
    rounding: RoundingInfo | None = None

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        _require(self.cache_dtype in KV_DTYPES, f"kv_dtype is {self.kv_dtype!r}, expected one of {', '.join(KV_DTYPES)}")
        _require(self.max_seq_len > 0, f"max_seq_len is {self.max_seq_len}, expected at least 1 token")
        positions = self.model.max_position_embeddings  # 0: unknown
        _require(
            not positions or self.max_seq_len <= positions,
            f"max_seq_len is {self.max_seq_len}, the model knows {positions} positions",
        )
        _require(
            self.long_rotary_from is None or 0 < self.long_rotary_from < self.max_seq_len,
            f"long_rotary_from is {self.long_rotary_from}, expected a number of tokens below max_seq_len, {self.max_seq_len}",
        )
        _require(self.model.vocab_size > 0, "model.vocab_size must be at least 1")
        self._check_layers()
        self._check_segments()
        self._check_exits()
        self._check_draft_head()
        self._check_graphs()
        self._check_paths()

    @property
    def cache_dtype(self) -> str:
        """Data type of the KV caches."""
        return self.kv_dtype or self.dtype

    @property
    def logits_size(self) -> int:
        """Numbers in the output ``logits`` of a token, which of an embedding model are its final state."""
        return self.model.vocab_size if self.embedding is None else self.model.hidden_size

    @property
    def hidden_width(self) -> int:
        """Numbers in a token's hidden state between layers: hidden_size for each of its residual streams."""
        head = next(graph for graph in self.graphs if graph.name == HEAD)
        return int(head.inputs[0].shape[-1])

    @property
    def kv(self) -> dict[int, KVInfo]:
        """Layer number → cache, of the layers that have one of their own."""
        return {number: layer.kv for number, layer in enumerate(self.layers) if layer.kv is not None}

    @property
    def caches(self) -> dict[int, KVInfo]:
        """`kv`, and the draft head's cache, if it has one, as that of one more layer behind the last."""
        own = self.draft_head.kv if self.draft_head is not None else None
        return self.kv if own is None else {**self.kv, self.model.num_layers: own}

    @property
    def kv_sources(self) -> dict[int, int]:
        """Layer number → the layer whose cache it reads, of the layers without one of their own."""
        return {number: layer.kv_source for number, layer in enumerate(self.layers) if layer.kv_source is not None}

    @property
    def states(self) -> dict[tuple[int, int], StateInfo]:
        """(Layer number, number among the layer's states) → state."""
        return {(i, n): state for i, layer in enumerate(self.layers) for n, state in enumerate(layer.states)}

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state that sums up all tokens before, which cannot be cut as keys and values can."""
        return any(layer.states for layer in self.layers)

    @property
    def segments(self) -> list[GraphInfo]:
        return [g for g in self.graphs if g.layers is not None]

    def rounds(self, target: str) -> bool:
        """Whether ``target`` rounds activations, keys or values to few bits: in int8 caches, and on a processor in products with
        low-bit weights. GPUs multiply by dequantised weights."""
        info = self.targets[target]
        low_bits = info.products is not None or self.has_integer_products
        return (low_bits and info.backend == "onnxruntime-cpu") or self.cache_dtype == "int8"

    @property
    def has_integer_products(self) -> bool:
        return INTEGER_PRODUCTS in self.weights

    def _check_layers(self) -> None:
        count = self.model.num_layers
        _require(len(self.layers) == count, f"there are {len(self.layers)} layers, the model has {count}")
        loops = self.model.loops
        _require(loops > 0 and count % loops == 0, f"{count} layers are no whole number in each of {loops} loops")
        for number, layer in enumerate(self.layers):
            for state in layer.states:
                fits = len(state.shape) == STATE_KINDS.get(state.kind) and all(size > 0 for size in state.shape)
                _require(fits, f"layer {number} has a state of kind {state.kind!r} and shape {state.shape}")
            source = layer.kv_source
            _require(
                source is None or (0 <= source < number and layer.kv is None and source in self.kv),
                f"layer {number} reads the keys of layer {source}, which has none before it",
            )

    def _check_segments(self) -> None:
        edges = [0, *self.checkpoints, self.model.num_layers]
        expected = [[a, b] for a, b in itertools.pairwise(edges)]
        _require(
            [g.layers for g in self.segments] == expected and all(a < b for a, b in expected),
            f"segments {[g.layers for g in self.segments]} do not follow from the checkpoints {self.checkpoints}",
        )

    def _check_exits(self) -> None:
        if self.calibration is None:
            return
        checkpoints = [e.checkpoint for e in self.calibration.exits]
        _require(not (checkpoints and self.is_recurrent), "there are exits, which recurrent layers do not have")
        _require(
            checkpoints == sorted(set(checkpoints) & set(self.checkpoints)),
            f"exits at {checkpoints} are not among the checkpoints {self.checkpoints}",
        )
        for info in self.calibration.exits:
            start = self.model.num_layers - info.tail_layers
            _require(
                not info.tail_layers or info.checkpoint < start == self.checkpoints[-1],
                f"the head {info.head} of the exit at {info.checkpoint} is not the last segment",
            )

    def _check_draft_head(self) -> None:
        if self.draft_head is not None:
            layers = self.draft_head.layers
            count = self.model.num_layers
            fits = bool(layers) and layers == sorted(set(layers)) and layers[0] > 0 and layers[-1] <= count
            _require(fits, f"the draft head reads the states after layers {layers}, expected rising numbers from 1 to {count}")

    def _check_graphs(self) -> None:
        names = {g.name for g in self.graphs}
        _require(len(names) == len(self.graphs), "two graphs have the same name")
        _require(HEAD in names, "the graph head is missing")
        size = self.model.hidden_size
        read = [n for graph in self.graphs if graph.name == HEAD for tensor in graph.inputs for n in tensor.shape[-1:]]
        fits = size > 0 and len(read) == 1 and isinstance(read[0], int) and read[0] % size == 0
        _require(fits, f"the graph head reads states of {read} numbers, expected a multiple of the hidden size, {size}")
        exits = self.calibration.exits if self.calibration is not None else []
        wanted = {name for e in exits for name in exit_graphs(e)}
        missing = sorted(wanted - names)
        _require(not missing, f"the graphs {', '.join(missing)} are missing")
        unknown = sorted(names - wanted - {g.name for g in self.segments} - {HEAD})
        _require(not unknown, f"there is an unknown graph: {', '.join(unknown)}")
        for name, target in self.targets.items():
            _require(set(target.graphs) >= names, f"target {name} lacks graphs {sorted(names - set(target.graphs))}")

    def _check_paths(self) -> None:
        for path in self.files:
            check_relative(path)
        used = [p for t in self.targets.values() for p in (*t.graphs.values(), t.weights, t.products) if p is not None]
        if self.tokenizer is not None:
            info = self.tokenizer
            used += [p for p in (info.file, info.chat_template, info.tool_chat_template) if p is not None]
        missing = sorted(set(used) - set(self.files))
        _require(not missing, f"{missing} are used but not listed under files")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
            raise BundleError(f"{MANIFEST_NAME} is not JSON ({error}); export the bundle again") from error
        _require(isinstance(data, dict), f"{MANIFEST_NAME} holds {type(data).__name__}, expected an object")
        schema = data.get("schema")
        _require(isinstance(schema, int), "the field `schema` is missing or not a number")
        if schema != SCHEMA_VERSION:
            fix = "upgrade tide-llm" if schema > SCHEMA_VERSION else "export the model again with this version"
            raise BundleError(f"the bundle has schema {schema}, this runtime reads schema {SCHEMA_VERSION}; {fix}")
        return _build(Manifest, data, "manifest")


def exit_graph(info: ExitInfo) -> str:
    """Name of the graph with an exit's router and translator."""
    return f"exit_{info.checkpoint}"


def score_graph(info: ExitInfo) -> str:
    """Name of the graph of a router that reads the head's logits."""
    return f"{SCORE}{info.checkpoint}"


def exit_graphs(info: ExitInfo) -> dict[str, tuple[str, ...]]:
    """Name → outputs of the graphs that an exit has."""
    outputs = {exit_graph(info): info.graph_outputs(), score_graph(info): ("score",) * info.scores_logits}
    return {name: names for name, names in outputs.items() if names}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the bundle in ``directory``. Raises BundleError when it is missing or invalid."""
    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise BundleError(f"{directory} is not a directory; give the folder that tide-export wrote (--out)")
    if not path.is_file():
        raise BundleError(f"{directory} holds no {MANIFEST_NAME}, so it is not a TIDE bundle; make one with tide-export")
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8 text ({error}); export the bundle again") from error
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); make the bundle's files readable") from error


def check_relative(path: str) -> None:
    """Raise BundleError unless ``path`` stays inside the bundle."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or ":" in path or "\0" in path:
        raise BundleError(
            f"the manifest names the path {path!r}, which leaves the bundle; do not load bundles from untrusted sources"
        )


def _require(valid: bool, message: str) -> None:
    if not valid:
        raise BundleError(_invalid(message))


def _invalid(message: str) -> str:
    return f"invalid {MANIFEST_NAME}: {message}; export the bundle again"


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value`` (parsed JSON) as an instance of the annotated type ``kind``."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        match = next(
            (a for a in options if typing.get_origin(a) is not None or dataclasses.is_dataclass(a) or _is(value, a)),
            options[0],
        )
        return _build(match, value, where)
    if origin is list:
        _require(isinstance(value, list), f"{where} is {_kind(value)}, expected a list")
        return [_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), f"{where} is {_kind(value)}, expected an object")
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in value.items()}
    _require(_is(value, kind), f"{where} is {_kind(value)}, expected {kind.__name__}")
    return float(value) if kind is float else value


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), f"{where} is {_kind(value)}, expected an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    _require(not unknown, f"{where} has unknown fields {unknown}")
    optional = {
        n for n, f in fields.items() if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    missing = sorted(set(fields) - optional - set(value))
    _require(not missing, f"{where} lacks {missing}")
    fields_built = {name: _build(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**fields_built)
    except ParamsError as error:
        raise BundleError(_invalid(f"in {where}, {error}")) from error


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "an object", list: "a list"}.get(type(value), f"{value!r}")
