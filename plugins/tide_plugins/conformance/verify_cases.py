"""Cases of draft_verify: greedy and sampled, with and without proposals, finished rows, invalid distributions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tide_plugins.conformance.case import ELEMENTS, Array, Case, CaseSpec, Tensors, assert_same, rng_for, untouched
from tide_plugins.launch.draft_verify import prepare_draft_verify
from tide_plugins.reference.draft_verify import Verification, VerifyState, draft_verify, rest_distribution
from tide_plugins.reference.philox import uniform_at

_IDS = 40  # greedy cases draw their ids below this
_NEAR = 1e-5  # relative distance to a boundary within which a sample may fall on either side


@dataclass(frozen=True)
class _VerifyCase:
    """``vocab`` 0: greedy. ``agreement``: probability of a correct draft, or similarity of proposals to the distribution."""

    rows: int
    width: int
    vocab: int = 0
    dtype: str = "f32"
    proposals: bool = False
    agreement: float = 0.7
    eos: tuple[int, ...] = (3,)
    tight: bool = False  # limits a few tokens away
    started: bool = False  # some rows are finished before the step
    broken: bool = False

    @property
    def name(self) -> str:
        kind = f"vocab{self.vocab}-{self.dtype}" if self.vocab else "greedy"
        flags = "-proposals" * self.proposals + "-tight" * self.tight + "-started" * self.started + "-broken" * self.broken
        return f"{kind}-b{self.rows}-d{self.width}-agreement{self.agreement}-eos{len(self.eos)}{flags}"

    def build(self) -> Case:
        rng = rng_for(self.name)
        tensors = self._state(rng) | (self._distributions(rng) if self.vocab else self._deep_tokens(rng))
        if self.eos:
            tensors["eos"] = np.asarray(self.eos, np.int64)
        given = {name: tensor.copy() for name, tensor in tensors.items()}
        return Case(prepare_draft_verify, tensors | self._outputs(), {}, lambda out: self._check(out, given))

    def _state(self, rng: np.random.Generator) -> Tensors:
        length = rng.integers(1, 2**33, self.rows)
        room = rng.integers(2, self.width + 3, self.rows) if self.tight else np.full(self.rows, 1000)
        return {
            "draft_count": rng.integers(0, self.width + 1, self.rows).astype(np.int32),
            "drafts": rng.integers(0, self.vocab or _IDS, (self.rows, self.width)),
            "length": length,
            "last_token": rng.integers(0, self.vocab or _IDS, self.rows),
            "limit": length + room,
            "finished": rng.choice([0, 1, 2], self.rows).astype(np.uint8) if self.started else np.zeros(self.rows, np.uint8),
        }

    def _deep_tokens(self, rng: np.random.Generator) -> Tensors:
        drafts = rng.integers(0, _IDS, (self.rows, self.width))
        deep = rng.integers(0, _IDS, (self.rows, self.width + 1))
        right = rng.random((self.rows, self.width)) < self.agreement
        deep[:, : self.width][right] = drafts[right]
        return {"drafts": drafts, "deep_tokens": deep}

    def _distributions(self, rng: np.random.Generator) -> Tensors:
        probabilities = self._softmax(rng.standard_normal((self.rows, self.width + 1, self.vocab)) * 2)
        proposals = self._softmax(rng.standard_normal((self.rows, self.width, self.vocab)) * 2)
        proposals = self.agreement * probabilities[:, : self.width] + (1 - self.agreement) * proposals
        chosen = proposals if self.proposals else probabilities[:, : self.width]
        drawn = (chosen.cumsum(axis=-1) < rng.random((self.rows, self.width, 1))).sum(axis=-1)
        if self.broken:
            probabilities[0], probabilities[1] = np.nan, 0.0
        tensors = {
            "drafts": np.minimum(drawn, self.vocab - 1).astype(np.int64),
            "probabilities": probabilities.astype(ELEMENTS[self.dtype]),
            "seed": rng.integers(0, 2**64, self.rows, np.uint64),
        }
        return tensors | ({"proposals": proposals.astype(ELEMENTS[self.dtype])} if self.proposals else {})

    def _softmax(self, logits: Array) -> Array:
        weights = np.exp(logits)
        return weights / weights.sum(axis=-1, keepdims=True)

    def _outputs(self) -> Tensors:
        counts = {name: untouched(self.rows) for name in ("accepted", "emitted")}
        return {**counts, "tokens": untouched(self.rows, self.width + 1, dtype=np.int64), "running": untouched(1)}

    def _check(self, out: Tensors, given: Tensors) -> None:
        for row in range(self.rows):
            expected = self._expected(given, row)
            tokens = tuple(int(token) for token in out["tokens"][row][: len(expected.tokens)])
            if tokens != expected.tokens and self._nearly(given, row, expected, tokens):
                continue  # the state may differ too: the other token may be an eos id
            self._check_row(out, row, expected)
        assert_same("running", out["running"], [(out["finished"] == 0).sum()])

    def _expected(self, given: Tensors, row: int) -> Verification:
        state = VerifyState(*(int(given[name][row]) for name in ("length", "last_token", "finished")))
        kwargs: dict[str, Any] = {"limit": int(given["limit"][row]), "eos": self.eos}
        for name in ("deep_tokens", "probabilities", "proposals"):
            kwargs[name] = given[name][row] if name in given else None
        seed = int(given["seed"][row]) if "seed" in given else 0
        return draft_verify(state, self._drafts(given, row), seed=seed, **kwargs)

    def _drafts(self, given: Tensors, row: int) -> list[int]:
        return [int(draft) for draft in given["drafts"][row][: given["draft_count"][row]]]

    def _nearly(self, given: Tensors, row: int, expected: Verification, tokens: tuple[int, ...]) -> bool:
        """Whether only the sampled token differs, and is within float32 rounding of the boundary."""
        if not self.vocab or len(tokens) != expected.accepted + 1 or tokens[:-1] != expected.tokens[:-1]:
            return False
        proposals = given["proposals"][row] if self.proposals else None
        weights = rest_distribution(self._drafts(given, row), expected.accepted, given["probabilities"][row], proposals)
        cumulative = np.cumsum(weights)
        target = uniform_at(int(given["seed"][row]), int(given["length"][row]) + 1 + expected.accepted, 1) * cumulative[-1]
        drawn, room = tokens[-1], _NEAR * cumulative[-1]
        return bool(weights[drawn] > 0 and cumulative[drawn] - weights[drawn] - room <= target <= cumulative[drawn] + room)

    def _check_row(self, out: Tensors, row: int, expected: Verification) -> None:
        place = f"row {row}: "
        assert_same(place + "accepted", out["accepted"][row], np.int32(expected.accepted))
        assert_same(place + "emitted", out["emitted"][row], np.int32(len(expected.tokens)))
        rest = [-1] * (self.width + 1 - len(expected.tokens))
        assert_same(place + "tokens", out["tokens"][row], [*expected.tokens, *rest])
        for name in ("length", "last_token", "finished"):
            assert int(out[name][row]) == getattr(expected.state, name), f"{place}{name} is {out[name][row]}, expected {expected}"


def _specs() -> Iterator[_VerifyCase]:
    for rows, width, tight in product((0, 1, 33), (1, 4, 40), (False, True)):
        yield _VerifyCase(rows, width, tight=tight, agreement=0.95 if width > 4 else 0.7)
    yield _VerifyCase(16, 4, started=True)
    yield _VerifyCase(16, 4, eos=())
    yield _VerifyCase(16, 4, agreement=0.0)
    yield _VerifyCase(16, 4, agreement=1.0, eos=(3, 5, 7))
    for dtype, vocab, proposals in product(ELEMENTS, (1, 7, 33, 1000, 2053), (False, True)):
        yield _VerifyCase(24, 3, vocab, dtype, proposals)
    for base in (_VerifyCase(24, 3, 50), _VerifyCase(24, 3, 50, proposals=True)):
        yield replace(base, tight=True)
        yield replace(base, started=True)
        yield replace(base, broken=True)
        yield replace(base, agreement=1.0)
    yield _VerifyCase(2, 1, 40_000, "f16")


def verify_cases() -> Iterator[CaseSpec]:
    for case in _specs():
        yield CaseSpec("draft_verify", f"draft_verify-{case.name}", case.build)
