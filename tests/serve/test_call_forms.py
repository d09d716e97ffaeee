"""Tool calls in the form of each family's template, written for these tests in the manner of the published ones."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.grammar import GrammarCompiler
from tide_serve.request.call_learning import learned_form
from tide_serve.request.prompt_ids import with_calls_as_text
from tide_serve.request.tool_calls import ToolCallParser, split_calls
from tide_serve.request.tools import ToolPlan, call_forms
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).with_name("call_templates").iterdir())}
SCHEMA = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "a": {"type": "integer"},
        "o": {"type": "object"},
        "b": {"type": "boolean"},
        "u": {"enum": ["mild", "hot"]},
    },
    "required": ["q"],
}
TOOLS: dict[str, dict[str, Any]] = {"f": SCHEMA, "g": {"type": "object", "properties": {}}}
DEFINITIONS = tuple({"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items())
NOT_LEARNED = {"granite_3_3", "lfm2", "phi_4_mini", "smollm_3", "plain"}  # their histories show no calls

F, G = ["f", {"q": "x"}], ["g", {}]
# What a model of each family writes: output, its text, its calls.
OUTPUTS = json.loads(Path(__file__).with_name("calls.json").read_text(encoding="utf-8"))["families"]
ALL = [(family, *output) for family, outputs in OUTPUTS.items() for output in outputs]


learned_of = cache(lambda family: learned_form(FAMILIES[family]))
forms_of = cache(lambda family: call_forms(FAMILIES[family]))


def pieces_read(family: str, pieces: list[str]) -> tuple[str, list[Any]]:
    parser = ToolCallParser(TOOLS, forms=forms_of(family))
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in parts), [[call.name, json.loads(call.arguments)] for _, calls in parts for call in calls]


@cache
def cuts_that_differ(family: str, output: str) -> list[int]:
    """Where a stream that is cut has another text or other calls than the whole output; 0: cut everywhere."""
    whole = pieces_read(family, [output])
    cuts = {0: [*output], **{cut: [output[:cut], output[cut:]] for cut in range(1, len(output))}}
    return [cut for cut, pieces in cuts.items() if pieces_read(family, pieces) != whole]


@pytest.mark.parametrize(
    ("family", "output", "text", "calls"), ALL, ids=[f"{family}-{len(output)}" for family, output, *_ in ALL]
)
def test_outputs_are_read_wherever_they_are_cut(family: str, output: str, text: str, calls: list[Any]) -> None:
    """Breaks: a call of this family comes as text, or a stream has other calls than the whole answer."""
    assert pieces_read(family, [output]) == (text, calls)
    assert cuts_that_differ(family, output) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_and_what_is_said(family: str) -> None:
    """Breaks: TIDE guesses a form where the template shows none, or does not report that it was not learned."""
    learned = learned_of(family)
    assert (learned.form is None, learned.flaw) == (
        (True, "its history shows no calls") if family in NOT_LEARNED else (False, "")
    )


def rendered(family: str, calls: list[Any]) -> str:
    """A turn with ``calls``, and all before it, as the template writes it."""
    called = [
        {"id": f"a1b2c3d4{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": called}]
    if family in NOT_LEARNED:
        messages[1] = with_calls_as_text(messages[1], forms_of(family)[0])
    prompt = render_chat(FAMILIES[family], messages[:1], special_tokens={})
    chat = render_chat(FAMILIES[family], messages, special_tokens={}, add_generation_prompt=False)
    return (chat[len(prompt) :] if chat.startswith(prompt) else chat).partition("<|eot")[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_history_keeps_calls(family: str) -> None:
    """Breaks: a model does not see what it called in earlier turns, or sees it in another form than it writes."""
    wanted = [["f", {"q": 'say "x"', "a": 2}]]
    _, calls = split_calls(rendered(family, wanted), TOOLS, forms=forms_of(family))
    assert [[call.name, json.loads(call.arguments)] for call in calls] == wanted


MARK = re.compile(r"<[|｜][^<>\s]+>|</?tool_call>|\[[A-Z_]+\]")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    """Bytes, and the marks of all forms as special tokens."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {mark for family in FAMILIES for form in forms_of(family) for mark in MARK.findall(form.literals)}
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ["<eos>", *sorted(marks)]])
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


@pytest.mark.parametrize("strict", [False, True], ids=["required", "strict"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_in_the_form_of_the_model(family: str, strict: bool, vocabulary: tuple[Tokenizer, Path]) -> None:
    """Breaks: with tool_choice "required" or strict tools the model has to write a form that it was not trained on."""
    tokenizer, path = vocabulary
    forms = forms_of(family)
    tools = tuple({**tool, "function": {**tool["function"], "strict": strict}} for tool in DEFINITIONS)
    tokens = {mark: tokenizer.token_to_id(mark) for mark in MARK.findall(forms[0].literals)}
    grammar = ToolPlan(tools, required=not strict, forms=forms, tokens=tokens).grammar(None)
    assert grammar is not None
    compiler = GrammarCompiler(path, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])

    def taken(calls: list[Any]) -> bool:
        ids = tokenizer.encode(forms[0].text(calls).strip()).ids
        return compiler.start(grammar).num_valid(ids) == len(ids)

    assert taken([F]) and taken([("f", {"q": "é", "a": -3, "b": True, "u": "hot"})]) and taken([G])
    assert taken([("f", {"q": "x", "o": {"k": [1, "y"]}})])
    assert not taken([("h", {})]) or (strict and not forms[0].openings)
    if forms[0].openings:
        assert not taken([("f", {"q": "x", "u": "cold"})]) and not taken([("f", {"a": 2})])
    if forms[0].several:
        assert taken([F, G])
