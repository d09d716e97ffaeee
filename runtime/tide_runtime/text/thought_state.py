"""Where a sequence is in its thoughts, token by token: what its grammar masks, and when a budget closes them.

All of it follows from the sequence's own tokens, so a text is the same whatever was drafted, and beside any others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tide_runtime.text.grammar import GrammarState
from tide_runtime.text.thoughts import TAG, ThoughtMarks, Thoughts, ThoughtSplitter
from tide_runtime.text.token_bytes import TokenBytes
from tide_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MarkTokens:
    """Marks in tokens of one model.

    Args:
        marks: as text whose characters are bytes, since a token may be part of a character.
        heads: ids of the opening mark, and of the head of an answer where each has one.
        closing: ids of the closing mark, with what stands before and behind it.
        last: id of the closing mark's last token, and the text of it; None: the mark is one token.
        gap: ids between the closing mark and the answer.
        special: id → mark, or part of one, that is a special token.
    """

    marks: ThoughtMarks
    heads: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    last: tuple[int, str] | None
    gap: tuple[int, ...]
    special: Mapping[int, str]


class ThoughtVocabulary:
    """Starts the states of a model's sequences. ``only(token)``: [V] the mask of one token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._bytes = TokenBytes(tokenizer)
        self._tokens = lru_cache(16)(self._tokens_of)
        self.only = lru_cache(32)(lambda token: self._mask([token]))

    def start(self, thoughts: Thoughts, grammar: GrammarState | None, eos: Collection[int]) -> ThoughtState:
        """The state before the first token. ``grammar``: of the answer; ``eos``: ends no thoughts that an answer must follow."""
        tokens = self._tokens(thoughts.marks)
        place = _Place(ThoughtSplitter(tokens.marks, thoughts.begun))
        return ThoughtState(self, tokens, place, thoughts.budget, grammar, self._mask(eos, others=True))

    def special(self, marks: ThoughtMarks) -> Mapping[int, str]:
        """Id → part of ``marks`` that is a special token, which texts leave out unless they are told not to."""
        return self._tokens(marks).special

    def text(self, token: int) -> str:
        """The text of ``token``, whose characters are bytes."""
        return self._bytes.of(token).decode("latin-1")

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of ``text``, which follows other text: without the space that some tokenizers put before a text."""
        before = self._tokenizer.decode(self._tokenizer.lead)
        ids = self._tokenizer.encode(before + text, add_special_tokens=False)
        skipped = self._tokenizer.encode(before, add_special_tokens=False) if before else []
        return tuple(ids[len(skipped) :])

    def _mask(self, ids: Collection[int], others: bool = False) -> NDArray[np.bool_]:
        mask = np.full(self._vocab_size, others)
        mask[[token for token in ids if token < self._vocab_size]] = not others
        return mask

    def _tokens_of(self, marks: ThoughtMarks) -> MarkTokens:
        closing = self.encode(marks.closing)
        last = (closing[-1], self.text(closing[-1])) if len(closing) > 1 else None
        names = ("opening", "closing", "lead", "gap", "ending")
        spelled = ThoughtMarks(**{name: getattr(marks, name).encode().decode("latin-1") for name in names})
        forced = self.encode(marks.lead + marks.closing + marks.gap)
        text = f"{marks.opening}{marks.closing}{marks.gap}{marks.ending}"
        entries = {token: self._tokenizer.token(token) or "" for token in self._tokenizer.special_ids}
        special = {token: entry for token, entry in entries.items() if entry in text and TAG.fullmatch(entry)}
        heads = tuple(map(self.encode, marks.first_heads))
        return MarkTokens(spelled, heads, forced, last, self.encode(marks.gap), special)


@dataclass
class _Place:
    """A place in an output.

    Args:
        splitter: has read the output so far.
        tokens: of thoughts, their marks included.
        forced: ids that come next.
        pending: ids that are an answer's or thoughts'.
        answer: ids that the grammar has not taken yet.
    """

    splitter: ThoughtSplitter
    tokens: int = 0
    forced: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


class ThoughtState:
    """Where one sequence is: after the tokens given to `take`. To a depth policy it is a `GrammarState`."""

    def __init__(
        self,
        vocabulary: ThoughtVocabulary,
        tokens: MarkTokens,
        place: _Place,
        budget: int | None,
        grammar: GrammarState | None,
        unended: NDArray[np.bool_],
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._place = place
        self._budget = budget
        self._grammar = grammar
        self._unended = unended

    @property
    def thought_tokens(self) -> int:
        """Tokens of thoughts so far, their marks included."""
        return self._place.tokens

    @property
    def complete(self) -> bool:
        """Whether no more text may follow."""
        return self._grammar is not None and self._place.splitter.phase == "answer" and self._grammar.complete

    def take(self, token: int) -> None:
        """``token`` is output."""
        if self._place.splitter.phase == "answer":
            answer: tuple[int, ...] = (token,)
        else:
            place = self._after(self._place, token)
            self._place = replace(place, answer=())
            answer = place.answer
        if self._grammar is not None:
            for answered in answer:
                self._grammar.take(answered)

    def forced(self) -> list[int]:
        """The next tokens where there is no choice; often none."""
        if self._grammar is not None and self._place.splitter.phase == "answer":
            return self._grammar.forced()
        return [*self._place.forced]

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many of ``drafts``, which follow what was taken, are allowed one after the other."""
        place = self._place
        for number, token in enumerate(drafts):
            if place.splitter.phase == "answer":
                if self._grammar is None:
                    break
                rest = [*place.answer, *drafts[number:]]
                return max(0, self._grammar.num_valid(rest) - len(place.answer)) + number
            mask = self._mask(place)
            if mask is not None and not mask[token]:
                return number
            place = self._after(place, token)
        return len(drafts)

    def allowed(self, drafts: Sequence[int]) -> NDArray[np.bool_] | None:
        """[V] whether each token may follow ``drafts``, which follow what was taken; None: all may. Raises GrammarError as
        `GrammarState.allowed` does."""
        place = self._place
        for number, token in enumerate(drafts):
            if place.splitter.phase == "answer":
                place = replace(place, answer=(*place.answer, *drafts[number:]))
                break
            place = self._after(place, token)
        return self._mask(place)

    def _mask(self, place: _Place) -> NDArray[np.bool_] | None:
        if place.forced:
            return self._vocabulary.only(place.forced[0])
        if self._grammar is None:
            return None
        if place.splitter.phase == "answer":
            return self._grammar.allowed(place.answer)
        if place.splitter.phase == "thoughts":
            return self._unended
        return self._mask_of_beginning(self._grammar, place.pending)

    def _mask_of_beginning(self, grammar: GrammarState, pending: tuple[int, ...]) -> NDArray[np.bool_]:
        """The mask after ``pending``, which may become a head of thoughts or of an answer, or is an answer without one."""
        heads = self._tokens.heads
        begun = len(pending)
        if len(heads) == 1 and grammar.num_valid(pending) == begun:
            mask = grammar.allowed(pending).copy()
        else:
            mask = np.zeros_like(self._unended)
        mask[[head[begun] for head in heads if head[:begun] == pending and begun < len(head)]] = True
        return mask if mask.any() else self._unended  # after a draft that is not allowed

    def _after(self, place: _Place, token: int) -> _Place:
        """The place after ``token``."""
        was = place.splitter.phase
        if was == "answer":
            return replace(place, answer=(*place.answer, token))
        splitter = place.splitter.copy()
        forced = place.forced
        split = splitter.feed(self._vocabulary.text(token))
        forced = forced[1:] if forced and token == forced[0] else ()
        pending = (*place.pending, token) if splitter.phase == was == "before" else ()
        answer = self._answer((*place.pending, token), split.answer) if splitter.phase == "answer" else ()
        is_thought = splitter.phase == "thoughts" or was == "thoughts"
        tokens = place.tokens + (len(place.pending) + 1 if is_thought else 0)
        if splitter.phase == "thoughts" and not forced:
            forced = self._forced_in_thoughts(splitter, tokens)
        if self._grammar is not None and splitter.phase == "gap":
            forced = forced if forced or was == "gap" else self._gap_after(splitter.pending)
            if not forced:
                splitter.phase = "answer"
        return _Place(splitter, tokens, forced, pending, answer)

    def _forced_in_thoughts(self, splitter: ThoughtSplitter, tokens: int) -> tuple[int, ...]:
        if self._budget is not None and tokens >= self._budget:
            return self._tokens.closing
        last = self._tokens.last
        # A longer token would close the thoughts and begin the answer, which is the grammar's.
        if (
            self._grammar is not None
            and last is not None
            and splitter.pending.endswith(self._tokens.marks.closing[: -len(last[1])])
        ):
            return (last[0],)
        return ()

    def _gap_after(self, pending: str) -> tuple[int, ...]:
        """The gap without what the closing mark's token has had of it."""
        return self._tokens.gap if not pending else ()

    def _answer(self, tokens: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The last of ``tokens`` that spell ``text``, the beginning of an answer."""
        for begin in range(len(tokens), -1, -1):
            if "".join(map(self._vocabulary.text, tokens[begin:])) == text:
                return tokens[begin:]
        return self._vocabulary.encode(text.encode("latin-1").decode(errors="replace"))
