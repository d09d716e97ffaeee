"""Hold a target of a GPU to the eager model, on the GPU: its segments as the runtime's own backend runs them.

Each segment starts from the eager model's states at its cut, so a fault has a place. Three kinds of steps run, because a target
may have a form of a segment for each: texts together, as drafts of several sequences are verified; each alone, as a prompt; and
the last tokens of texts one by one. Then the segments run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import Backend
from tide_runtime.backends.device.device_target import DeviceTarget
from tide_runtime.backends.device.element_types import BF16
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import DRAFT, STATES, UNCUT, GraphInfo

from tide_export.verify.check_results import INT8_TOLERANCE, TOLERANCE, Check, refuse_failed
from tide_export.verify.verify_bundle import DECODED, Reference, check_graph, check_prompts

_ALONE, _TOGETHER = "one text alone", "texts together, then token by token"
Array = NDArray[np.float32]


def verify_on_device(bundle: Bundle, target: str, reference: Reference, dtype: str) -> list[Check]:
    """Check ``target`` on the GPU here, where the segments as they run are held to a bound on the KL divergence but in fp32.

    Raises:
        TargetError: the target cannot be loaded here, or memory is short.
        BundleError: its graphs are refused.
        VerificationError: a difference exceeds rounding; names segments and prompts.
    """
    backend = load_backend(bundle, target, ThreadOptions())
    checks = list(_checks(backend, bundle, target, reference, dtype))
    refuse_failed(checks)
    return checks


def _checks(backend: Backend, bundle: Bundle, target: str, reference: Reference, dtype: str) -> Iterator[Check]:
    manifest = bundle.manifest
    eager = reference.eager
    rounds = manifest.cache_dtype == "int8"
    tolerance = max(TOLERANCE[dtype], INT8_TOLERANCE) if rounds else TOLERANCE[dtype]
    segments = manifest.segments
    last = manifest.model.num_layers
    most = min([len(reference.texts), *(profile.rows[2] for profile in manifest.targets[target].profiles)])
    texts = _Texts([text.ids for text in reference.texts[:most]])
    owners = [text.name for text in reference.texts[:most] for _ in text.ids]
    kinds = {_ALONE: texts.alone(), _TOGETHER: texts.together(cast(DeviceTarget, backend).takes)}
    runs = _DevicePass(backend, segments, texts)
    for number, segment in enumerate(segments):
        first, end = segment.layers or (0, 0)
        for kind, launches in kinds.items():
            rows = _rows(launches)
            output = runs.run(number, launches, eager.states[first] if number else None)[rows]
            expected = (eager.states[end] if end < last else eager.logits)[rows]
            named = [owners[row] for row in rows]
            yield check_graph(f"{target} {segment.name}, {kind}", (first, end), named, output, expected, tolerance)
    states: Array | None = None
    for number in range(len(segments)):
        states = runs.run(number, kinds[_ALONE], states)
    assert states is not None
    unrounded = reference.unrounded.logits[: len(states)]
    most_different = tolerance if dtype == "fp32" and not rounds else None
    yield from check_prompts(reference.texts[:most], unrounded, states, most_different)
    if reference.drafts is not None and DRAFT in manifest.targets[target].graphs:
        yield from _check_draft(runs, target, reference, last, tolerance)
    runs.close()


def _check_draft(runs: _DevicePass, target: str, reference: Reference, depth: int, tolerance: float) -> Iterator[Check]:
    """What the graph of all ``depth`` layers gives the draft head, and the head's states and scores of the pairs of each text."""
    texts, drafts = reference.texts, reference.drafts
    assert drafts is not None
    every, pairs = [text.ids for text in texts], [text.ids[1:] for text in texts]
    owners = [text.name for text in texts for _ in text.ids]
    given, _ = runs.run_draft(UNCUT, every)
    allowed = 4 * tolerance  # errors of all segments add up
    yield check_graph(f"{target} {UNCUT}, {STATES}", (0, depth), owners, given, np.concatenate(drafts.head_inputs), allowed)
    owners = [text.name for text in texts for _ in text.ids[1:]]
    found = runs.run_draft(DRAFT, pairs, drafts.before)
    for name, output, expected in zip((STATES, "score"), found, (drafts.states, drafts.scores), strict=True):
        yield check_graph(f"{target} {DRAFT}, {name}", (depth, depth + 1), owners, output, expected, tolerance)


@dataclass(frozen=True)
class _Launch:
    """A step: ``counts[b]`` tokens of each sequence from ``row`` on, after ``cached[b]``; ``tokens``: their places among all."""

    row: int
    counts: list[int]
    cached: list[int]
    tokens: NDArray[np.int64]


def _rows(launches: Sequence[_Launch]) -> NDArray[np.int64]:
    """The places of all tokens that ``launches`` run, ascending."""
    return np.sort(np.concatenate([launch.tokens for launch in launches]))


class _Texts:
    """Texts whose tokens are packed one text after the other."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
        self.lengths = [len(text) for text in texts]
        self._starts = [int(start) for start in np.cumsum([0, *self.lengths[:-1]])]

    def alone(self) -> list[_Launch]:
        return [
            _Launch(row, [length], [0], np.arange(start, start + length))
            for row, (start, length) in enumerate(zip(self._starts, self.lengths, strict=True))
        ]

    def together(self, takes: Callable[[int, int], bool]) -> list[_Launch]:
        """Texts of more than `DECODED` tokens, in one step where the target ``takes`` it, then those tokens; all texts, and no
        more, where none is that long."""
        long = [(s, n) for s, n in zip(self._starts, self.lengths, strict=True) if n > DECODED]
        decoded = DECODED if long else 0
        long = long or list(zip(self._starts, self.lengths, strict=True))
        begun = [n - decoded for _, n in long]
        places = [np.arange(start, start + n) for (start, _), n in zip(long, begun, strict=True)]
        if takes(len(long), max(begun)):
            launches = [_Launch(0, begun, [0] * len(long), np.concatenate(places))]
        else:
            launches = [_Launch(row, [n], [0], place) for row, (n, place) in enumerate(zip(begun, places, strict=True))]
        for number in range(decoded):
            cached = [n + number for n in begun]
            launches.append(_Launch(0, [1] * len(long), cached, np.array([s for s, _ in long]) + cached))
        return launches


class _DevicePass:
    """Runs ``segments`` of ``backend`` on ``texts`` of T tokens, from empty caches."""

    def __init__(self, backend: Backend, segments: Sequence[GraphInfo], texts: _Texts) -> None:
        self._segments, self._texts = segments, texts
        self._stores_bits = getattr(backend, "element", None) is BF16
        self._context = backend.context(len(texts.lengths))

    def run(self, number: int, launches: Sequence[_Launch], states: Array | None) -> Array:
        """States [T, H] after segment ``number``, or logits [T, V], from the ``states`` before it; None: from the ids. Zeros for
        tokens that no launch runs."""
        for row in range(len(self._texts.lengths)):
            self._context.forget_row(row)
        made: Array | None = None
        for launch in launches:
            step: Any = self._context.step(launch.row, launch.counts, launch.counts)
            count = len(launch.tokens)
            step.input_ids[:count] = self._texts.ids[launch.tokens]
            step.place(launch.cached)
            if states is not None:
                step.hidden[number - 1][:count] = self._stored(states[launch.tokens])
            step.run(self._segments[number].name)
            output = step.logits if number == len(self._segments) - 1 else step.hidden[number]
            values = np.asarray(output[:count]).astype(np.float32)
            made = np.zeros((len(self._texts.ids), values.shape[1]), np.float32) if made is None else made
            made[launch.tokens] = values
        assert made is not None
        return made

    def run_draft(self, graph: str, texts: Sequence[Sequence[int]], before: Sequence[Array] = ()) -> tuple[Array, Array]:
        """States [T, D] and scores [T, 1] of `UNCUT`, which has no scores, or `DRAFT` on all tokens, each text alone."""
        states, scores = list[Array](), list[Array]()
        for row, ids in enumerate(texts):
            if not (count := len(ids)):
                continue
            step: Any = self._context.step(row, [count], [count])
            step.input_ids[:count] = ids
            if before:
                step.before[:count] = self._stored(before[row])
            step.place([0])
            step.run(graph)
            states.append(np.asarray(step.states[:count]).astype(np.float32))
            scores.append(step.score[:count, None].copy())
        return np.concatenate(states), np.concatenate(scores)

    def _stored(self, states: Array) -> NDArray[Any]:
        """``states`` as the backend takes them: NumPy has no bf16, so its bits."""
        if not self._stores_bits:
            return states
        return torch.from_numpy(states).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def close(self) -> None:
        self._context.close()
