"""Compare a finished bundle with the eager model on real prompts: each graph by itself, then the segments as they run.

A segment starts from the eager model's state at its cut, so that errors do not add up and a fault has a place. Products with
low-bit weights round their activations to int8, which changes a logit far more than another order of sums does and would hide a
wrong weight: so each graph is first compared without that rounding. The segments as they run, one after the other, are held to a
bound on the KL divergence where they round and to the tolerance where they do not, and tokens one by one to the pass over the
prompt. A bundle with int8 KV caches is compared graph by graph with the eager model over a cache rounded in the same way.

One session is in memory at a time, and of a model without storage one layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.manifest import DRAFT, LOOP, STATES, UNCUT, Manifest, read_manifest
from tide_runtime.errors import ModelFilesError
from tide_runtime.text.tokenizer import Tokenizer

from tide_export.drafters.rounded import RoundedDrafter
from tide_export.quantize.kv_scales import KVScales, rounded_cache
from tide_export.quantize.layerwise import EagerPass, eager_pass, last_logits_step_by_step, layer_by_layer
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.check_results import (
    INT8_TOLERANCE,
    TOLERANCE,
    Check,
    GraphCheck,
    PromptCheck,
    StateCheck,
    StepCheck,
    TextCheck,
    refuse_failed,
)
from tide_export.verify.checks import compare_rest
from tide_export.verify.checks.stored_values import StoredValues
from tide_export.verify.text_pass import TextPass, open_session
from tide_export.verify.verify_draft import ExpectedDrafts, expected_drafts

PROMPTS = (
    "def binary_search(items, target):\n    ",
    "The quick brown fox jumps over the lazy dog. In the beginning",
    'import json\n\n\nclass Config:\n    """Settings read from a file."""\n\n    def __init__(self, path):\n',
    "Q: What is the capital of France?\nA:",
)
TEXT = (
    "The library opened its doors on a cold morning in March, and by noon every chair was taken. People had come from all over "
    "the city to see the old maps, which had been kept in a cellar for more than a hundred years. Most of them were drawn by "
    "hand. A few showed rivers that no longer exist, and one, the largest, gave the names of all the streets in two languages. "
    "The director said that the maps would stay in the reading room until the end of the summer."
)
MIN_KINDS = 24  # different tokens of the prompts, and how many random ids take their place where there are fewer
MAX_PROMPT = 128  # tokens; where each letter is one, the texts have 450, and their logits a GB
MIN_TEXT = 32  # tokens of it from which on its loss means something
OWN_STEPS = 2  # tokens that recurrent models run with transformers' own states; each reads all weights again
DECODED = 8  # tokens at the end of each prompt that run one by one as well
Array = NDArray[np.float32]


class _Text(NamedTuple):
    """A prompt whose tokens stand at the positions from ``first`` on; the bundle's position ids are larger by ``offset``."""

    name: str
    ids: list[int]
    first: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Reference:
    """What the eager model computes for ``texts``: with KV caches rounded as the bundle's, and ``unrounded``; what a draft head
    does, if there is one; and how the model token by token, with its own cache, differs from its pass, where that was tried."""

    texts: list[_Text]
    eager: EagerPass
    unrounded: EagerPass
    drafts: ExpectedDrafts | None = None
    own_steps: StepCheck | None = None


def verify_bundle(
    loaded: LoadedModel,
    directory: Path,
    dtype: str,
    kv_scales: Mapping[int, KVScales] | None = None,
    reference: Reference | None = None,
) -> list[Check]:
    """`check_bundle`; raises VerificationError that names the segments and prompts whose difference exceeds rounding."""
    checks = check_bundle(loaded, directory, dtype, kv_scales, reference)
    refuse_failed(checks)
    return checks


def eager_reference(
    loaded: LoadedModel,
    directory: Path,
    kv_scales: Mapping[int, KVScales] | None = None,
    values: StoredValues | None = None,
    drafter: RoundedDrafter | None = None,
) -> Reference:
    """Run the eager model once, for all targets of the bundle in ``directory``.

    Args:
        kv_scales: of the bundle's int8 caches.
        values: compares each parameter with the model's file.
        drafter: the bundle's draft head.
    """
    manifest = read_manifest(directory)
    texts = _texts(manifest, prompts(manifest, _tokenizer(manifest, directory)))
    source = loaded.parameters
    with layer_by_layer(loaded.model, source, values.compare if values is not None else None):
        tapped = {0, *drafter.drafter.taps} if drafter is not None else set()
        eager = _eager(loaded, texts, sorted({*manifest.checkpoints, *_loop_ends(manifest), *tapped}), kv_scales)
        unrounded = _eager(loaded, texts, []) if kv_scales else eager
        own_steps = _own_steps(loaded, texts[-1].ids, unrounded, manifest.dtype) if loaded.is_recurrent else None
    if values is not None:
        compare_rest(values, source)
    drafts = None
    if drafter is not None:
        drafts = expected_drafts([text.ids for text in texts], eager, drafter, loaded.model.dtype, bool(manifest.weights))
    return Reference(texts, eager, unrounded, drafts, own_steps)


def _own_steps(loaded: LoadedModel, ids: Sequence[int], eager: EagerPass, dtype: str) -> StepCheck | None:
    """A check of the functions that a recurrent model of transformers has for one token against its scan; None: too short.

    ``ids``: of the last text of ``eager``.
    """
    if len(ids) <= OWN_STEPS:
        return None
    steps = last_logits_step_by_step(loaded.model, ids, OWN_STEPS)
    passed = eager.logits[-OWN_STEPS:]
    return StepCheck("transformers' own cache", _largest(steps - passed, passed)[0], TOLERANCE[dtype])


def check_bundle(
    loaded: LoadedModel,
    directory: Path,
    dtype: str,
    kv_scales: Mapping[int, KVScales] | None = None,
    reference: Reference | None = None,
) -> list[Check]:
    """Checks of target ``cpu``: of every graph, of the segments token by token, of every prompt as they run; and of the loss on a
    text.

    Args:
        kv_scales: of the bundle's int8 caches.
        reference: of `eager_reference`; None: made here, without a draft head.
    """
    manifest = read_manifest(directory)
    reference = reference or eager_reference(loaded, directory, kv_scales)
    texts, eager = reference.texts, reference.eager
    tolerance = max(TOLERANCE[dtype], INT8_TOLERANCE) if kv_scales else TOLERANCE[dtype]
    rounds = bool(loaded.quantized or kv_scales)
    checks: list[Check] = list(_check_graphs(manifest, directory, texts, eager, tolerance))
    if reference.drafts is not None:
        checks += _check_draft(manifest, directory, texts, reference.drafts, tolerance)
    logits, steps = _as_it_runs(manifest, directory, texts, INT8_TOLERANCE if rounds else tolerance)
    checks += steps
    if reference.own_steps is not None:
        checks.append(reference.own_steps)
    if manifest.embedding is not None:
        return [*checks, *_check_states(texts, reference.unrounded.logits, logits)]
    checks += check_prompts(texts, reference.unrounded.logits, logits, None if rounds else tolerance)
    if manifest.tokenizer is not None and texts and len(last := texts[-1].ids) >= MIN_TEXT:
        checks.append(TextCheck(_loss(last, eager.logits[-len(last) :]), float(np.log(manifest.model.vocab_size))))
    return checks


def _texts(manifest: Manifest, named: Sequence[tuple[str, list[int]]]) -> list[_Text]:
    """The prompts; where long texts have other rotary factors, at the end of the longest one, and as short ones besides."""
    original = manifest.long_rotary_from
    if original is None:
        return [_Text(name, ids) for name, ids in named]
    first = manifest.max_seq_len - max(len(ids) for _, ids in named)
    long = [_Text(f"{name} (in a long text)", ids, first, original) for name, ids in named]
    return [*long, *(_Text(name, ids[:original]) for name, ids in named)]


def _eager(
    loaded: LoadedModel, texts: Sequence[_Text], cuts: Sequence[int], kv_scales: Mapping[int, KVScales] | None = None
) -> EagerPass:
    """What the model computes for ``texts``; those at the same positions in one pass, for which it chooses rotary factors."""
    passes = []
    for first, together in itertools.groupby(texts, lambda text: text.first):
        cache = rounded_cache(kv_scales, loaded.num_layers) if kv_scales else None
        passes.append(eager_pass(loaded.model, [text.ids for text in together], cuts, cache, first))
    if len(passes) == 1:
        return passes[0]
    states = {cut: np.concatenate([one.states[cut] for one in passes]) for cut in cuts}
    return EagerPass(states, np.concatenate([one.logits for one in passes]))


def _loss(ids: Sequence[int], logits: Array) -> float:
    """Nats per token of ``ids`` after the first, from the logits [S, V] at each."""
    likelihoods = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
    return float(-likelihoods[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean())


def prompts(manifest: Manifest, tokenizer: Tokenizer | None) -> list[tuple[str, list[int]]]:
    """Text prompts cut to the cache; seeded token ids without a tokenizer, or where it knows hardly a word of them: a channel is
    held to its size over all tokens, and over the same token again and again it may be as small as rounding errors.

    Raises ModelFilesError where plain text has tokens that the model has no embedding for.
    """
    vocab = manifest.model.vocab_size
    room = max(1, min(manifest.max_seq_len - 1, MAX_PROMPT))
    if tokenizer is not None:
        encoded = [(text, tokenizer.encode(text)) for text in (*PROMPTS, TEXT)]
        largest = max((max(ids) for _, ids in encoded if ids), default=0)
        if largest >= vocab:
            raise ModelFilesError(
                f"the tokenizer gives plain text the id {largest}, the model's ids end at {vocab - 1}: it belongs to another "
                "model; put the model's own tokenizer.json into its directory, or name it with --tokenizer DIR"
            )
        if len({one for _, ids in encoded for one in ids}) >= min(MIN_KINDS, vocab):
            return [(text.splitlines()[0], ids[:room]) for text, ids in encoded if ids]
    rng = np.random.default_rng(0)
    return [(f"{n} random ids", rng.integers(0, vocab, min(n, room)).tolist()) for n in (1, 7, MIN_KINDS)]


def _tokenizer(manifest: Manifest, directory: Path) -> Tokenizer | None:
    return Tokenizer.from_file(directory / manifest.tokenizer.file) if manifest.tokenizer is not None else None


def _check_graphs(
    manifest: Manifest, directory: Path, texts: Sequence[_Text], eager: EagerPass, tolerance: float
) -> Iterator[GraphCheck]:
    """Each segment, its activations not rounded, from the eager model's state at its cut to that at the next, or to logits; then
    the graph of all segments and that of a loop, in each loop, if there are any."""
    run = _pass(manifest, texts)
    graphs = manifest.targets["cpu"].graphs
    last = manifest.model.num_layers
    owners = [text.name for text in texts for _ in text.ids]
    parts = [(segment.name, tuple(segment.layers or ())) for segment in manifest.segments]
    parts += [(UNCUT, (0, last))] if UNCUT in graphs else []
    parts += [(LOOP, loop) for loop in itertools.pairwise([0, *_loop_ends(manifest), last])] if LOOP in graphs else []
    for graph, (first, end) in parts:
        file = directory / graphs[graph]
        name = "logits" if end == last and graph == LOOP else None  # which outputs states as well
        states = eager.states[first] if first else None
        output = run.run(open_session(file, exact=True), states, name)  # no name keeps the session
        expected = eager.states[end] if end < last else eager.logits
        allowed = tolerance * (4 if graph == UNCUT else 1)  # errors of all segments add up
        yield check_graph(graph, (first, end), owners, output, expected, allowed)


def check_graph(
    graph: str, layers: tuple[int, int], owners: Sequence[str], output: Array, expected: Array, allowed: float
) -> GraphCheck:
    """A check of one graph. Its ``output`` [T, …] becomes the difference from ``expected``: logits of a large vocabulary are
    hundreds of MB. ``owners``: the prompt of each token."""
    output -= expected
    difference, token = _largest(output, expected)
    return GraphCheck(graph, layers, owners[token], difference, allowed, float(max(output.max(), -output.min())))


def _check_draft(
    manifest: Manifest, directory: Path, texts: Sequence[_Text], drafts: ExpectedDrafts, tolerance: float
) -> Iterator[GraphCheck]:
    """What the graph of all layers gives the draft head, and the head's states and scores of the pairs of each text, its
    activations not rounded, from the eager model's states."""
    files = manifest.targets["cpu"].graphs
    depth = manifest.model.num_layers
    owners = [text.name for text in texts for _ in text.ids]
    given = _pass(manifest, texts).run(open_session(directory / files[UNCUT], exact=True), output=STATES)
    yield check_graph(f"{UNCUT}, {STATES}", (0, depth), owners, given, np.concatenate(drafts.head_inputs), 4 * tolerance)
    run = TextPass(manifest, [text.ids[1:] for text in texts if len(text.ids) > 1])
    owners = [text.name for text in texts for _ in text.ids[1:]]
    before = np.concatenate(drafts.before)
    for name, expected in ((STATES, drafts.states), ("score", drafts.scores)):
        found = run.run(open_session(directory / files[DRAFT], exact=True), before, name)
        yield check_graph(f"{DRAFT}, {name}", (depth, depth + 1), owners, found, expected, tolerance)


def _loop_ends(manifest: Manifest) -> list[int]:
    """Layers run at the end of each loop but the last, which ends in logits."""
    layers = manifest.model.num_layers // manifest.model.loops
    count = manifest.model.num_layers
    return list(range(layers, count, layers))


def _pass(manifest: Manifest, texts: Sequence[_Text], decoded: int = 0) -> TextPass:
    return TextPass(manifest, [text.ids for text in texts], decoded, [text.first + text.offset for text in texts])


def _largest(difference: Array, values: Array) -> tuple[float, int]:
    """The largest of `_relative` over tokens and channels, and its token."""
    by_token, by_channel = _relative(difference, values, 1), _relative(difference, values, 0)
    return float(np.maximum(by_token.max(), by_channel.max())), int(by_token.argmax())  # NaN stays


def _relative(difference: Array, values: Array, axis: int) -> Array:
    """Root mean square of ``difference`` along ``axis`` over that of ``values``; values near zero count as a hundredth of the
    typical size, as rounding errors of other ones reach them."""
    kept = "ct"[axis]
    count = values.shape[axis]
    size, error = (np.sqrt(np.einsum(f"tc,tc->{kept}", x, x) / count) for x in (values, difference))  # without a copy
    return error / np.maximum(size, 1e-2 * np.median(size) + np.finfo(np.float32).tiny)


def _as_it_runs(manifest: Manifest, directory: Path, texts: Sequence[_Text], tolerance: float) -> tuple[Array, list[StepCheck]]:
    """Logits [T, V] of the texts by the segments one after the other, and a check of each segment token by token."""
    long = [len(text.ids) > DECODED for text in texts]
    whole = _pass(manifest, texts)
    steps = _pass(manifest, [text for text, is_long in zip(texts, long, strict=True) if is_long], DECODED) if any(long) else None
    rows = np.repeat(long, [len(text.ids) for text in texts])
    checks: list[StepCheck] = []

    def run(name: str, states: Array | None) -> Array:
        session = open_session(directory / manifest.targets["cpu"].graphs[name])
        output = whole.run(session, states)
        if steps is not None:
            one_by_one = steps.run(session, states[rows] if states is not None else None)
            at_once = output[rows]
            one_by_one -= at_once
            checks.append(StepCheck(name, _largest(one_by_one, at_once)[0], tolerance))
        return output

    states = None
    for segment in manifest.segments:
        states = run(segment.name, states)
    assert states is not None
    return states, checks


def check_prompts(texts: Sequence[_Text], expected: Array, logits: Array, tolerance: float | None) -> Iterator[PromptCheck]:
    """``expected``: the eager model's logits [T, V] of the prompts; ``logits``: the bundle's.

    ``tolerance``: relative to the largest logit; None: the bundle rounds to int8.
    """
    ends = np.cumsum([len(text.ids) for text in texts])[:-1]
    for text, wanted, found in zip(texts, np.split(expected, ends), np.split(logits, ends), strict=True):
        yield PromptCheck(
            prompt=text.name,
            tokens=len(text.ids),
            max_difference=float(np.abs(found - wanted).max()),  # NaN stays
            tolerance=None if tolerance is None else tolerance * max(1.0, float(np.abs(wanted).max())),
            divergence=mean_divergence(wanted, found),
            agreement=float((found.argmax(-1) == wanted.argmax(-1)).mean()),
        )


def _check_states(texts: Sequence[_Text], expected: Array, states: Array) -> Iterator[StateCheck]:
    """`check_prompts` of an embedding model, from its final states [T, H] and the bundle's."""
    ends = np.cumsum([len(text.ids) for text in texts])[:-1]
    cosines = (expected * states).sum(-1) / (np.linalg.norm(expected, axis=-1) * np.linalg.norm(states, axis=-1))
    for text, found in zip(texts, np.split(cosines, ends), strict=True):
        yield StateCheck(text.name, float(found.min()))  # NaN stays


def mean_divergence(expected: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """KL(expected ‖ other) of the distributions of logits [S, V], in nats, mean over the tokens."""
    total = 0.0
    for wanted, found in zip(*(torch.from_numpy(x).split(16) for x in (expected, logits)), strict=True):  # V is large
        p, q = (x.double().log_softmax(-1) for x in (wanted, found))
        total += float((p.exp() * (p - q)).sum())
    return total / len(expected)
