"""Structured outputs: texts belong to their grammar under every policy, and `exact` drafts what the grammar forces."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, Grammar, ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import GrammarError, ParamsError
from tide_runtime.text.grammar import GrammarCompiler, GrammarState

SCHEMA = {
    "type": "object",
    "properties": {"id": {"enum": ["ab", "cd"]}, "on": {"type": "boolean"}},
    "required": ["id", "on"],
    "additionalProperties": False,
}
FORM = Grammar.json_schema(SCHEMA)
PROMPT = "class Point:"


def load(bundle: Path, policy: str, **depth: str) -> Engine:
    options = EngineOptions(policy=policy, depth=DepthOptions(**depth), threads=ThreadOptions(1), verify=False)  # type: ignore[arg-type]
    return Engine.load(bundle, options)


@pytest.fixture(scope="module")
def full(exits_bundle: Path) -> Iterator[Engine]:
    with load(exits_bundle, "full") as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(exits_bundle: Path) -> Iterator[Engine]:
    with load(exits_bundle, "exact") as engine:
        yield engine


@pytest.mark.parametrize("policy", ["full", "exact", "exit"])
def test_every_output_is_valid_under_its_schema(exits_bundle: Path, policy: str) -> None:
    """A client that parses the output must never meet text outside the schema, however random the model is."""
    with load(exits_bundle, policy) as engine:
        for seed in range(8):
            params = GenerationParams(max_new_tokens=48, temperature=1.0, seed=seed, grammar=FORM)
            generation = engine.generate(PROMPT, params)[0]
            value = json.loads(generation.text or "")
            assert value["id"] in ("ab", "cd") and value["on"] in (True, False) and len(value) == 2
            assert generation.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_gives_the_text_of_full(full: Engine, exact: Engine, temperature: float) -> None:
    """Drafts that a grammar forces must not change a text, alone or beside requests without a grammar."""
    for seed in range(4):
        params = GenerationParams(max_new_tokens=48, temperature=temperature, seed=seed, grammar=FORM)
        wanted = full.generate(PROMPT, params)[0]
        free = GenerationParams(max_new_tokens=20, temperature=temperature, seed=seed)
        others = [exact.submit("def add(a, b):", free) for _ in range(2)]
        found = exact.submit(PROMPT, params).result()
        assert (found.token_ids, found.text, found.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
        assert others[0].result().token_ids == full.generate("def add(a, b):", free)[0].token_ids


def test_forced_tokens_are_drafts_that_all_hold(full: Engine, exact: Engine) -> None:
    """Structure speeds decoding up: the names of the fields take no pass of their own."""
    params = GenerationParams(max_new_tokens=48, grammar=FORM)
    stats = exact.generate(PROMPT, params)[0].stats
    assert stats.drafted["grammar"] == stats.accepted["grammar"] > stats.new_tokens / 2
    assert stats.deep_passes < full.generate(PROMPT, params)[0].stats.new_tokens / 2


def test_grammar_drafts_can_be_left_out(exits_bundle: Path) -> None:
    """`--draft ngram` is what a benchmark of the grammar's drafts compares with."""
    with load(exits_bundle, "exact", draft="ngram") as engine:
        assert "grammar" not in engine.generate(PROMPT, GenerationParams(max_new_tokens=48, grammar=FORM))[0].stats.drafted


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar.regex("(yes|no)!"), {"yes!", "no!"}),
        (Grammar.lark('start: "a" ("b" | "c")'), {"ab", "ac"}),
        (Grammar.lark('start: "<" x ">"\nx: %json {"type": "boolean"}'), {"<true>", "<false>"}),
    ],
)
def test_outputs_end_where_the_grammar_is_complete(exact: Engine, grammar: Grammar, texts: set[str]) -> None:
    """Without an end of its own a complete text would be followed by an end token, or by anything under ignore_eos."""
    for ignore_eos in (False, True):
        params = GenerationParams(max_new_tokens=30, temperature=1.0, seed=3, grammar=grammar, ignore_eos=ignore_eos)
        generation = exact.generate(PROMPT, params)[0]
        assert generation.text in texts and generation.finish_reason == "stop"


def test_an_open_grammar_ends_with_the_models_end_token_or_the_limit(exact: Engine) -> None:
    """Text that may go on is not cut: the model decides."""
    generation = exact.generate(
        PROMPT, GenerationParams(max_new_tokens=12, temperature=1.0, seed=0, grammar=Grammar.regex("[ab]*"))
    )[0]
    assert set(generation.text or "") <= {"a", "b"} and generation.finish_reason in ("eos", "length")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "foo"}), "JSON schema cannot be compiled: Invalid type: foo"),
        (Grammar.json_schema("{"), "JSON schema cannot be read"),
        (Grammar.regex("[a"), "regular expression cannot be compiled"),
        (Grammar.lark("start: FOO"), "Lark grammar cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_at_once(exact: Engine, grammar: Grammar, reason: str) -> None:
    """The server answers 400 with the reason before anything is queued."""
    for refused in (lambda: exact.submit(PROMPT, GenerationParams(grammar=grammar)), lambda: exact.check_grammar(grammar)):
        with pytest.raises(GrammarError, match=reason):
            refused()
    assert exact.stats().waiting == 0


def test_a_schema_that_is_not_json_is_refused() -> None:
    with pytest.raises(GrammarError, match="not JSON"):
        Grammar.json_schema({"enum": [object()]})


def test_a_bundle_without_tokenizer_is_refused() -> None:
    """Token ids alone have no text that a grammar could be about."""
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(None, 10, [0]).start(FORM)
    with pytest.raises(ParamsError, match="grammar is"):
        GenerationParams(grammar="yes")  # type: ignore[arg-type]


def test_a_compiled_grammar_does_not_wait_for_another_one_that_compiles(exact: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: all streams of a server stop while a large schema of one request is compiled, for seconds at worst."""
    compiler, compile_grammar, slow = exact.grammars, exact.grammars._compile, Grammar.regex("slow")
    compiler.start(FORM)
    entered, may_end, compiled = threading.Event(), threading.Event(), list[Grammar]()

    def compile_slowly(grammar: Grammar) -> Any:
        compiled.append(grammar)
        entered.set()
        assert may_end.wait(60)
        return compile_grammar(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    with ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(compiler.start, slow) for _ in range(2)]
            assert entered.wait(60)
            assert pool.submit(compiler.start, FORM).result(30).complete is False
        finally:
            may_end.set()
        assert [state.result(60).complete for state in waiting] == [False, False]
    assert compiled == [slow]


class RefusingMatcher:
    """Allows token 3 in its mask, and refuses it: what llguidance does with literals that together spell an added token."""

    def is_stopped(self) -> bool:
        return False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0

    def compute_ff_tokens(self) -> list[int]:
        return [3]

    def validate_tokens(self, tokens: list[int]) -> int:
        return 0


def test_a_token_that_the_matcher_refuses_ends_the_request_with_an_error() -> None:
    """The mask would stay the same for ever, and an output outside the grammar look finished."""
    state = GrammarState(RefusingMatcher(), 8)  # type: ignore[arg-type]
    assert state.forced() == []
    state.take(3)
    with pytest.raises(GrammarError, match="after token 3"):
        state.allowed([])
