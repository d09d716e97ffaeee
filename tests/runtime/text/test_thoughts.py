"""A model that thinks aloud must be understood from its chat template alone, and its thoughts must not become its answer."""

from itertools import pairwise
from pathlib import Path

import pytest
from tide_runtime.text.chat_template import analysed, render_chat
from tide_runtime.text.thoughts import ThoughtMarks, ThoughtSplitter

# Written for these tests: each declares thoughts in another way.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).with_name("chat_templates").iterdir()}
TAGS = ThoughtMarks("<think>", "</think>", lead="\n", gap="\n\n")
CHANNELS = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>", gap="<|start|>assistant<|channel|>final<|message|>")
WORDS = ThoughtMarks("<think>", "</think>", gap="\n<response>", ending="</response>")
BEGUN = ThoughtMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", lead="\n", gap="\n")
NAMED = ThoughtMarks(
    "<|open|>think<|sep|>", "<|close|>think<|sep|>", gap="<|open|>response<|sep|>", ending="<|close|>response<|sep|>"
)
OF_CALLS = ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>", gap="<|START_RESPONSE|>", ending="<|END_RESPONSE|>")
NO_GAP = ThoughtMarks("<think>", "</think>")
LONGER = ThoughtMarks("<a>", "</a>", gap="<a>b")  # the head of thoughts is the beginning of an answer's
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("template", "marks", "field", "switch"),
    [
        ("thoughts_switch", TAGS, "reasoning_content", "enable_thinking"),
        ("thoughts_channels", CHANNELS, "reasoning_content", None),
        ("thoughts_parts", ThoughtMarks("[THINK]", "[/THINK]"), "parts", None),
        ("thoughts_words", WORDS, None, "thinking"),
        ("thoughts_cut", ThoughtMarks("<think>", "</think>", gap="\n\n"), None, None),
        ("deepseek_r1", ThoughtMarks("<think>", "</think>", lead="\n", gap="\n\n"), None, None),
        ("thoughts_block", ThoughtMarks("<|channel>thought", "<channel|>"), None, "enable_thinking"),
        ("thoughts_begun", BEGUN, "reasoning_content", None),
        ("deepseek_v31", ThoughtMarks("<think>", "</think>"), None, "thinking"),
        ("thoughts_named", NAMED, "reasoning_content", "thinking"),
        ("thoughts_off", ThoughtMarks("<think:it>", "</think:it>"), "reasoning_content", None),
        ("thoughts_of_calls", OF_CALLS, "tool_plan", None),
        ("thoughts_behind_answers", ThoughtMarks("<think>", "</think>"), "reasoning_content", None),
        ("thoughts_blocks", ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"), "blocks", None),
        *((name, None, None, None) for name in ("hermes", "llama_3", "mistral_3", "qwen_coder", "gemma_3", "phi_4", "smolvlm")),
    ],
)
def test_the_template_declares_thoughts(template: str, marks: ThoughtMarks | None, field: str | None, switch: str | None) -> None:
    """Breaks: thoughts are shown as the answer, or an answer as thoughts."""
    found = analysed(TEMPLATES[template]).thoughts
    assert (found.marks, found.field, found.switch) == (marks, field, switch)


def test_efforts_are_those_that_the_template_takes() -> None:
    """Breaks: an effort that the model was not trained on is accepted."""
    assert analysed(TEMPLATES["thoughts_channels"]).thoughts.efforts == ("low", "medium", "high")
    named = "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('effort') }}{% endif %}{{ messages[0].content }}"
    assert analysed(named).thoughts.efforts == ("none", "high")
    assert analysed(TEMPLATES["thoughts_off"]).thoughts.efforts == ("no_think", "low", "high")
    assert analysed(TEMPLATES["thoughts_switch"]).thoughts.efforts == ()


def test_history_has_the_thoughts_in_the_field_that_the_template_reads() -> None:
    """Breaks: a model does not see what it thought between the calls of a task."""
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "T"}]
    shown = {
        name: render_chat(TEMPLATES[name], chat, special_tokens=SPECIAL, add_generation_prompt=False)
        for name in ("thoughts_switch", "thoughts_channels", "thoughts_parts", "thoughts_cut", "thoughts_blocks")
    }
    assert "<think>\nT\n</think>\n\nA" in shown["thoughts_switch"]
    assert "<|channel|>analysis<|message|>T<|end|>" in shown["thoughts_channels"]
    assert shown["thoughts_parts"] == "<s>[INST]Q[/INST][THINK]T[/THINK]A</s>"
    assert "T" not in shown["thoughts_cut"]
    assert "<|inner_prefix|>T<|inner_suffix|>A" in shown["thoughts_blocks"]


TEXTS = [
    (TAGS, True, "t</think>\n\n    return x", "t", "    return x"),
    (TAGS, True, "t</think>\n\n\n\n\tx", "t", "\n\n\tx"),
    (TAGS, True, "t</think>\n  x", "t", "  x"),
    (NO_GAP, True, "t</think>\n  x", "t", "\n  x"),
    (TAGS, True, "<think>\nt <think></think>\n\nx", "t <think>", "x"),
    (TAGS, False, "<think> <think> <thi</think>x", "<thi", "x"),
    (TAGS, True, "<thi", "<thi", ""),
    (LONGER, False, "<a>bx", "", "x"),
    (LONGER, False, "<a>cx</a><a>bx", "cx", "x"),
    (LONGER, False, "<a>t</a><a>u</a><a>bx", "t\n\nu", "x"),
    (NAMED, True, f"t{NAMED.closing}{NAMED.gap}x", "t", "x"),
    (OF_CALLS, False, "<|START_RESPONSE|> x", "", " x"),
    (TAGS, False, "<think>\nA < b.\n\nSo.\n</think>\n\n 42 ", "A < b.\n\nSo.", " 42 "),
    (TAGS, False, "\n<think></think>\nno", "", "no"),
    (TAGS, False, "  <thin air", "", "  <thin air"),
    (TAGS, False, " <th", "", " <th"),
    (TAGS, False, "No <think>thoughts</think>", "", "No <think>thoughts</think>"),
    (TAGS, False, "<think>cut </thin", "cut </thin", ""),
    (TAGS, True, "begun\n</think>\n\n", "begun", ""),
    (TAGS, True, "a </thi</think>\n\n<think>b", "a </thi", "<think>b"),
    (WORDS, False, "<think>a</think>\n\n<response> b", "a", " b"),
    (WORDS, False, "<think>a</think> <respond", "a", " <respond"),
    (CHANNELS, False, f"{CHANNELS.opening}a<|end|>{CHANNELS.gap}b", "a", "b"),
    (CHANNELS, False, "<|channel|>final<|message|>b", "", "b"),
    (
        CHANNELS,
        False,
        f"{CHANNELS.opening}a<|end|><|start|>assistant{CHANNELS.opening} c<|end|>{CHANNELS.gap}b",
        "a\n\nc",
        "b",
    ),
]


@pytest.mark.parametrize(("marks", "begun", "text", "thoughts", "answer"), TEXTS)
def test_thoughts_and_answer_do_not_depend_on_where_the_text_is_cut(
    marks: ThoughtMarks, begun: bool, text: str, thoughts: str, answer: str
) -> None:
    """Breaks: a streamed answer differs from a whole one."""
    cuts = [[0, len(text)], [*range(len(text) + 1)], *([0, at, len(text)] for at in range(len(text) + 1))]
    for places in cuts:
        splitter = ThoughtSplitter(marks, begun)
        parts = [*(splitter.feed(text[a:b]) for a, b in pairwise(places)), splitter.feed("", last=True)]
        assert "".join(part.thoughts for part in parts) == thoughts
        assert "".join(part.answer for part in parts) == answer
        assert "".join(part.before for part in parts) + answer == text
