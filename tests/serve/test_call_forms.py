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

F, FA, G = ("f", {"q": "x"}), ("f", {"q": "x <b>\ny", "a": 2}), ("g", {})
JSON = '{"name": "f", "arguments": {"q": "x"}}'
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=q>\nx <b>\ny\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
)
QWEN_G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
# What a model of the family writes: (output, its text, its calls).
OUTPUTS: dict[str, list[tuple[str, str, list[Any]]]] = {
    "apertus": [('<|tools_prefix|>[{"f": {"q": "x"}}, {"g": {}}]<|tools_suffix|>', "", [F, G])],
    "command_r7b": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"q": "x"}},\n'
            '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
            "",
            [F, G],
        ),
    ],
    "deepseek_r1": [
        (
            'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"q": "x"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So.",
            [F, G],
        ),
    ],
    "deepseek_v3_1": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [F]),
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜>', "", [F]),  # a section that is not opened
    ],
    "deepseek_v3_2": [
        (
            'Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">x <b>\ny'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            "Hm.\n\n",
            [FA],
        ),
    ],
    "devstral": [('[TOOL_CALLS]f[ARGS]{"q": "x"}[TOOL_CALLS]g[ARGS]{}', "", [F, G])],
    "ernie_4_5": [(f"\n{HERMES}\n\n{HERMES}\n", "", [F, F])],
    "functionary_3_1": [('<function=f>{"q": "x"}</function><function=g>{}</function>', "", [F, G])],
    "gemma_4": [
        ('<|tool_call>call:f{q:<|"|>x <b>\ny<|"|>,a:2}<tool_call|><|tool_call>call:g{}<tool_call|>', "", [FA, G]),
        ('<|tool_call>call:f{o:{k:[1,<|"|>}<|"|>]}}<tool_call|>', "", [("f", {"o": {"k": [1, "}"]}})]),
    ],
    "gigachat_3": [(f"<|function_call|>{JSON}", "", [F])],
    "glm_4_5": [
        (
            "\n<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>x <b>\ny</arg_value>\n<arg_key>a</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            "",
            [FA, G],
        ),
    ],
    "glm_4_7": [("<tool_call>f<arg_key>q</arg_key><arg_value>x</arg_value></tool_call><tool_call>g</tool_call>", "", [F, G])],
    "gpt_oss": [
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"q": "x"}<|call|>', "", [F]),
        ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"q": "x"}<|call|>', "", [F]),
        (' to=functions.f<|channel|>analysis<|message|>{"q": "x"}', "", [F]),
    ],
    "granite_3_3": [('<|tool_call|>[{"name": "f", "arguments": {"q": "x"}}]', "", [F])],
    "granite_4": [(f"{HERMES}\n{HERMES}", "", [F, F])],
    "hunyuan": [(f"<tool_calls>[{JSON}]</tool_calls>", "", [F])],
    "hy_3": [
        (
            "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
            "<tool_call>g<tool_sep>\n</tool_call>\n</tool_calls>",
            "",
            [F, G],
        ),
    ],
    "kimi_k2": [
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|>'
            "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "",
            [F, G],
        ),
    ],
    "lfm2": [('<|tool_call_start|>[f(q="x"), g()]<|tool_call_end|>Now.', "Now.", [F, G])],
    "lfm2_5": [("<|tool_call_start|>[f(q='x', b=True), g()]<|tool_call_end|>", "", [("f", {"q": "x", "b": True}), G])],
    "llama_3_1": [
        ('{"name": "f", "parameters": {"q": "x"}}', "", [F]),
        ('{"type": "function", "name": "g", "parameters": {}}', "", [G]),
    ],
    "llama_4": [('[f(q="x"), g()]', "", [F, G])],
    "minicpm_5": [
        ('<function name="f"><param name="q"><![CDATA[x <b>\ny]]></param><param name="a">2</param></function>', "", [FA]),
    ],
    "minimax_m1": [(f'<tool_calls>\n{JSON}\n{{"name": "g", "arguments": {{}}}}\n</tool_calls>', "", [F, G])],
    "minimax_m2": [
        (
            '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="q">x</parameter>\n</invoke>\n'
            '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            "",
            [F, G],
        ),
    ],
    "mistral_nemo": [('[TOOL_CALLS][{"name": "f", "arguments": {"q": "x"}, "id": "a1b2c3d4e"}]', "", [F])],
    "mistral_small_3_2": [('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"q": "x"}', "", [F])],
    "muse": [
        (
            ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="q">x</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>",
            "",
            [F],
        ),
    ],
    "nemotron_3": [(f"{QWEN}\n{QWEN_G}\n", "", [FA, G])],
    "nemotron_nano_2": [(f"<TOOLCALL>[{JSON}, {JSON}]</TOOLCALL>", "", [F, F])],
    "olmo_3": [('<function_calls>\nf(q="x")\ng()\n</function_calls>', "", [F, G])],
    "phi_4_mini": [(f"functools[{JSON}]", "", [F]), (f"<|tool_call|>[{JSON}]<|/tool_call|>", "", [F])],
    "plain": [(HERMES, "", [F])],
    "qwen_2_5": [(f"Let me see.\n{HERMES}", "Let me see.\n", [F])],
    "qwen_3": [(f"{HERMES}\n{HERMES}", "", [F, F])],
    "qwen_3_5": [(QWEN, "", [FA])],
    "qwen_3_coder": [(QWEN, "", [FA]), (QWEN.removeprefix("<tool_call>\n"), "", [FA]), (QWEN_G + " So.", " So.", [G])],
    "seed_oss": [("<seed:tool_call>\n<function=f>\n<parameter=q>x</parameter>\n</function>\n</seed:tool_call>", "", [F])],
    "smollm_3": [(HERMES, "", [F])],
    "solar": [
        (
            '<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>f<|tool_call:args|>{"q": "x"}<|tool_call:end|>'
            "<|tool_call:begin|>c3d4<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|><|calls|>",
            "<|calls|>",
            [F, G],
        ),
    ],
    "xlam_2": [(f'[{JSON}, {{"name": "g", "arguments": {{}}}}]', "", [F, G])],
}  # fmt: skip
ALL = [(family, *output) for family, outputs in OUTPUTS.items() for output in outputs]


learned_of = cache(lambda family: learned_form(FAMILIES[family]))
forms_of = cache(lambda family: call_forms(FAMILIES[family]))


def pieces_read(family: str, pieces: list[str]) -> tuple[str, list[Any]]:
    parser = ToolCallParser(TOOLS, forms=forms_of(family))
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in parts), [(call.name, json.loads(call.arguments)) for _, calls in parts for call in calls]


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
    wanted = [("f", {"q": 'say "x"', "a": 2})]
    _, calls = split_calls(rendered(family, wanted), TOOLS, forms=forms_of(family))
    assert [(call.name, json.loads(call.arguments)) for call in calls] == wanted


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


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks: the share of families whose calls are learned falls."""
    learned = sum(learned_of(family).form is not None for family in FAMILIES)
    wrong = sum(pieces_read(family, [output]) != (text, calls) for family, output, text, calls in ALL)
    differs = sum(len(cuts_that_differ(family, output)) for family, output, *_ in ALL)
    results = {"forms": len(FAMILIES), "forms_learned": learned, "forms_wrong": wrong, "stream_differs": differs}
    with capsys.disabled():
        print("".join(f"\nRESULT {name}={value}" for name, value in results.items()))
    assert learned >= 26 and wrong == differs == 0
