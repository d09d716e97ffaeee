"""Structured outputs: grammars that say which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

A grammar masks logits before a token is chosen, under every policy. Tokens that it leaves no choice about are drafts of policy
``exact``, so fixed parts of a structure take one pass instead of one for each token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import GrammarError
from tide_runtime.text.grammar_ends import without_dead_ends
from tide_runtime.text.grammar_limits import check_integers, named_tokens, spells_one, with_schemas, without_forcing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED = 64  # compiled grammars of an engine; compiling takes 1 to 100 ms
# JSON as Python's json.dumps writes it. Without free white space the names of required properties follow from the schema.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """A language that an output must belong to; made by one of the class methods.

    The output ends when the grammar allows no more text, or with an end token where the text is complete. It may be incomplete
    where ``max_new_tokens`` ends it first.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that is valid under ``schema``, on one line, with ", " and ": " as separators.

        Integers beyond 2^53 as bounds or values are refused when it is compiled.

        Raises GrammarError where the schema is not JSON.
        """
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON ({error}); pass a dict of JSON values, or its text") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches ``pattern`` as a whole, in the syntax of Rust's regex crate."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text that llguidance's dialect of Lark accepts, which embeds JSON schemas as ``%json {…}``.

        A literal is text, also where it spells an added token of the model; the token itself is written without quotes, as
        ``<tool_call>``, or by its id, as ``<[151657]>``.
        """
        return cls("lark", grammar)


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        tokenizer: its tokenizer.json; None: the bundle has none.
        vocab_size: length V of the logits.
        eos: tokens that end a text.
    """

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._path = tokenizer
        self._eos = sorted(eos)
        self._tokenizer: LLTokenizer | None = None
        self._named_tokens: frozenset[str] = frozenset()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # guards what is compiled, for moments only: event loops take it

    def start(self, grammar: Grammar) -> GrammarState:
        """The state before the first token. Raises GrammarError where ``grammar`` cannot be compiled."""
        matcher = self._cached_matcher(grammar)
        if matcher is None:
            with self._compiling:
                matcher = self._cached_matcher(grammar)  # another thread may have compiled it meanwhile
                if matcher is None:
                    matcher = self._compile(grammar)
                    self._keep(grammar, matcher)
        with self._lock:
            return GrammarState(matcher.deep_copy(), self.vocab_size)

    def _cached_matcher(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise GrammarError("structured outputs need llguidance; pip install 'tide-llm[grammar]'") from error
        if self._path is None or not self._eos:
            lacks = "end token" if self._path is not None else "tokenizer"
            raise GrammarError(f"structured outputs need the model's {lacks}, which this bundle has not; export it again")
        check_integers(grammar.kind, grammar.source)
        if self._tokenizer is None:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            _keep_embedded(state, self.vocab_size)
            self._tokenizer = LLTokenizer(json.dumps(state), n_vocab=self.vocab_size, eos_token=self._eos)
            self._named_tokens = named_tokens(state)
        source = with_schemas(grammar.kind, grammar.source, lambda schema: without_dead_ends(schema, self._follows))
        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(source, overrides=JSON_STYLE)  # type: ignore[arg-type]
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(source)
            else:
                text = LLMatcher.grammar_from_lark(source)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the {_name(grammar)} cannot be read: {_reason(str(error))}") from error
        if spells_one(grammar.kind, grammar.source, self._named_tokens):
            text = without_forcing(text)
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the {_name(grammar)} cannot be compiled: {_reason(matcher.get_error())}")
        return matcher

    def _follows(self, schema: dict[str, Any], text: str) -> bool:
        """Whether any token may follow ``text`` under ``schema``."""
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE), log_level=0)  # type: ignore[arg-type]
        if matcher.try_consume_tokens(tokens := self._tokenizer.tokenize_str(text)) < len(tokens):
            return True  # the pattern is not one that llguidance reads, or the tokens go beyond it
        matcher.compute_bitmask()
        return not matcher.is_error()


def _keep_embedded(state: dict[str, Any], vocab_size: int) -> None:
    """Take tokens that the model has no logits for out of a tokenizer.json: llguidance refuses them, and none can be chosen."""
    model = state["model"]
    vocab = model.get("vocab", {})
    if isinstance(vocab, list):  # Unigram: an id is a place
        model["vocab"] = vocab[:vocab_size]
    elif any(token_id >= vocab_size for token_id in vocab.values()):
        kept = {token: token_id for token, token_id in vocab.items() if token_id < vocab_size}
        model["vocab"] = kept
        if "merges" in model:
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]
    state["added_tokens"] = [token for token in state.get("added_tokens", []) if token["id"] < vocab_size]


class GrammarState:
    """Where one sequence is in its grammar: after the tokens given to `take`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._drafts: list[int] = []  # consumed by the matcher beyond what was taken
        self._refused: int | None = None  # a token that the mask allowed and the matcher did not take
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._vocab_size = vocab_size

    @property
    def complete(self) -> bool:
        """Whether no more text may follow."""
        return not self._drafts and self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, token: int) -> None:
        """``token`` is output. One that the grammar does not allow, such as an end token, leaves the state as it is."""
        if self._drafts and self._drafts[0] == token:
            del self._drafts[0]
            return
        self._move_to([])
        if not self._matcher.is_stopped() and not self._matcher.try_consume_tokens([token]):
            self._refused = token

    def forced(self) -> list[int]:
        """The next tokens where the grammar leaves no choice; often none."""
        self._move_to([])
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many of ``drafts``, which follow what was taken, the grammar allows one after the other."""
        self._move_to([])
        return self._matcher.validate_tokens(list(drafts))

    def allowed(self, drafts: Sequence[int]) -> NDArray[np.bool_]:
        """[V] whether each token may follow ``drafts``, which follow what was taken. Raises GrammarError beyond limits of
        llguidance."""
        from llguidance.numpy import fill_next_token_bitmask

        if self._refused is not None:  # literals that only together spell an added token, see `grammar_limits`
            raise GrammarError(f"the grammar cannot be followed after token {self._refused}; write added tokens by their id")
        self._move_to(drafts)
        fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            raise GrammarError("the grammar allows no text here, or is too large for one token; simplify it")
        return np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little").view(np.bool_)

    def _move_to(self, drafts: Sequence[int]) -> None:
        """Set the matcher to the state after ``drafts``."""
        common = 0
        while common < min(len(drafts), len(self._drafts)) and drafts[common] == self._drafts[common]:
            common += 1
        if common < len(self._drafts):
            self._matcher.rollback(len(self._drafts) - common)
            del self._drafts[common:]
        for token in drafts[common:]:
            if not self._matcher.try_consume_tokens([int(token)]):
                return  # no token is chosen after a draft that the grammar does not allow
            self._drafts.append(int(token))


def _reason(error: str) -> str:
    """llguidance's error without the state that follows it."""
    return error.partition("\n<state>")[0].strip()


def _name(grammar: Grammar) -> str:
    return {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}[grammar.kind]
