"""Grammars whose literals spell added tokens of the model, on a vocabulary like Qwen's."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from runtime.text.test_tokenizer import BYTES
from tide_runtime import Grammar
from tide_runtime.errors import GrammarError
from tide_runtime.text.grammar import GrammarCompiler

TAG, END = "<tool_call>", "<|end|>"  # an added token that is text to the model, and a special one
EOS = 0


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(BYTES._backend.to_str())
    backend.post_processor = None
    backend.add_tokens([TAG, "</tool_call>"])
    return backend


@pytest.fixture(scope="module")
def compiler(backend: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return GrammarCompiler(path, backend.get_vocab_size(), [EOS])


@pytest.fixture(scope="module")
def generate(backend: tokenizers.Tokenizer, compiler: GrammarCompiler) -> Callable[[Grammar, int], list[int]]:
    """Random tokens that the masks of a grammar allow, up to its end."""

    def generate(grammar: Grammar, seed: int) -> list[int]:
        state, tokens, random = compiler.start(grammar), list[int](), np.random.default_rng(seed)
        while not state.complete and len(tokens) < 200:
            token = int(random.choice(np.flatnonzero(state.allowed([]))))
            if token == EOS:
                break
            state.take(token)
            tokens.append(token)
        return tokens

    return generate


GRAMMARS = {
    "schema": Grammar.json_schema({"enum": [f"{TAG}{END}", f"a{TAG}b"]}),
    "required field": Grammar.json_schema({"type": "object", "properties": {TAG: {"const": 1}}, "required": [TAG]}),
    "pattern": Grammar.regex(rf"({TAG}|x{re.escape(END)}/)+;"),
    "Lark string": Grammar.lark(f'start: "{TAG}" | "x" "{END}" "y"'),
    "Lark terminal": Grammar.lark(f'start: A\nA: /x{TAG}/ "{END}"'),
    "Lark schema": Grammar.lark(f'start: "call" %json {{"const": "{TAG}"}}'),
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_literals_are_text(
    backend: tokenizers.Tokenizer, generate: Callable[[Grammar, int], list[int]], grammar: Grammar
) -> None:
    """Breaks: such a grammar ends with an error in the middle of its text."""
    for seed in range(5):
        text = backend.decode(generate(grammar, seed), skip_special_tokens=True)
        assert TAG in text or END in text
        if grammar.kind == "json_schema":
            assert json.loads(text) in (f"{TAG}{END}", f"a{TAG}b") or TAG in json.loads(text)
        elif grammar.kind == "regex":
            assert re.fullmatch(grammar.source, text)


def test_a_name_is_the_token(backend: tokenizers.Tokenizer, generate: Callable[[Grammar, int], list[int]]) -> None:
    """Breaks: a grammar that names a token gets its letters, which the model has not learned as the beginning of a call."""
    tag = backend.token_to_id(TAG)
    for name in (TAG, f"<[{tag}]>"):
        assert generate(Grammar.lark(f'start: "x" {name} "y"'), 0) == [*backend.encode("x").ids, tag, *backend.encode("y").ids]


@pytest.mark.parametrize(
    ("grammar", "forced"),
    [
        (Grammar.lark(f'start: {TAG} "and so on"'), True),
        (Grammar.lark(f'// a call begins with {TAG}\nstart: "and so on"'), True),
        (Grammar.json_schema({"const": "tool_call"}), True),
        (Grammar.json_schema({"const": TAG}), False),
    ],
)
def test_only_such_literals_cost_forced_tokens(compiler: GrammarCompiler, grammar: Grammar, forced: bool) -> None:
    """Breaks: grammars lose the drafts that make them fast."""
    assert bool(compiler.start(grammar).forced()) == forced


def test_literals_in_pieces_end_with_a_reason(generate: Callable[[Grammar, int], list[int]]) -> None:
    """Breaks: the mask stays the same for ever."""
    with pytest.raises(GrammarError, match="by their id"):
        generate(Grammar.lark('start: "<tool_" "call>"'), 0)
