"""The grammar of a request's output: calls of its tools, with and without text, in every way a model may write them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tide_runtime import Grammar
from tide_runtime.text.grammar import GrammarCompiler
from tide_serve.request.call_formats import HERMES, json_form
from tide_serve.request.tools import ToolPlan

SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ANSWER = Grammar.json_schema({**SCHEMA, "properties": {"a": {"const": 1}, "name": {"const": "x"}}, "required": ["a"]})
F, F2, NOT_F = (f'{{"name": "f", "arguments": {{"x": {x}}}}}' for x in (1, 2, 3))
EOS = 0


def tool(strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": strict}}


def block(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text", "no tags"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def accepts(form: str, hf_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whether a text is a whole output under the grammar of a plan."""
    path = hf_model_directory / "tokenizer.json"
    if form != "tags are tokens":
        document = json.loads(path.read_text())
        document["added_tokens"] = [token for token in document["added_tokens"] if "tool" not in token["content"]]
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        path.write_text(json.dumps(document))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    compiler = GrammarCompiler(path, tokenizer.get_vocab_size(), [EOS])

    def accepts(plan: ToolPlan, answer: Grammar | None, text: str) -> bool:
        grammar = plan.grammar(answer)
        assert grammar is not None
        ids = tokenizer.encode(text).ids
        state = compiler.start(grammar)
        return state.num_valid(ids) == len(ids) and (state.allowed(ids)[EOS] or state.forced() == [])

    return accepts


def plan(form: str, *, required: bool, parallel: bool = True, strict: bool = False) -> ToolPlan:
    tokens = {"<tool_call>": 391, "</tool_call>": 392} if form == "tags are tokens" else {}
    forms = (json_form(),) if form == "no tags" else (HERMES,)
    return ToolPlan((tool(strict),), required=required, parallel=parallel, shown=True, forms=forms, tokens=tokens)


def calls(form: str, *several: str) -> str:
    return "\n".join(map(block, several)) if form != "no tags" else several[0]


def test_required(form: str, accepts: Any) -> None:
    """Breaks: with a required call, text or arguments out of the schema are possible, or the call is not."""
    for parallel in (False, True):
        required = plan(form, required=True, parallel=parallel)
        assert accepts(required, None, calls(form, F))
        assert not accepts(required, None, calls(form, NOT_F))
        assert not accepts(required, None, "Hello")
        assert accepts(required, None, calls(form, F, F2)) == (parallel and form != "no tags") or form == "no tags"


def test_strict_and_free(form: str, accepts: Any) -> None:
    """Breaks: strict tools forbid text, or allow a call out of the schema."""
    free = plan(form, required=False, strict=True)
    assert accepts(free, None, "Hello\n<b>there</b>") and accepts(free, None, calls(form, F))
    assert not accepts(free, None, calls(form, NOT_F))
    if form != "no tags":
        assert accepts(free, None, f"So.\n{block(F)}\n{block(F2)} Done.")
        assert not accepts(free, None, f"So.\n{block(NOT_F)}")
        one = plan(form, required=False, strict=True, parallel=False)
        assert accepts(one, None, f"So.\n{block(F)}") and not accepts(one, None, block(F) + block(F))


def test_an_answer_or_calls(form: str, accepts: Any) -> None:
    """Breaks: beside tools, an answer may leave its schema."""
    either = plan(form, required=False)
    assert accepts(either, ANSWER, '{"a": 1, "name": "x"}') and accepts(either, ANSWER, calls(form, F))
    assert not accepts(either, ANSWER, '{"a": 2}') and not accepts(either, ANSWER, calls(form, NOT_F))


def test_free_text_needs_no_grammar() -> None:
    """Breaks: every answer beside tools pays for a mask."""
    assert plan("no tags", required=False).grammar(None) is None
    assert ToolPlan().grammar(ANSWER) is ANSWER


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "parameters": {}}], ids=["none", "empty"])
def test_a_tool_without_parameters_takes_none(function: dict[str, Any], accepts: Any) -> None:
    """Breaks: a model makes arguments up for a function that takes none, which then fails at the client."""
    without = ToolPlan(({"type": "function", "function": function},), required=True, forms=(json_form(),))
    assert accepts(without, None, '{"name": "f", "arguments": {}}')
    assert not accepts(without, None, '{"name": "f", "arguments": {"x": 1}}')
    parser = without.parser()
    assert parser is not None
    assert parser.feed('{"name": "f", "arguments": {"x": 1}}', last=True)[1][0].arguments == "{}"
