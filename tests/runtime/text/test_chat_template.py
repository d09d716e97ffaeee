"""A chat must become exactly the prompt transformers would build, and a bad one must be explained."""

import subprocess
import sys

import pytest
import tokenizers
from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import render_chat
from transformers import PreTrainedTokenizerFast

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}"""

LLAMA = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}\
{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' }}{% if loop.first and system is defined %}{{ '<<SYS>>' + system + '<</SYS>>' }}{% endif %}
        {{- message['content'] | trim + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

FEATURES = """{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}{{ m | tojson }}{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}
{{ tools is none }} {{ documents is none }} {{ thinking_on | default('unset') }} {{ strftime_now('%Y') }}
{{ pad_token }}
{{ messages | tojson(indent=2) }} {{ messages[-1].reasoning_content }}"""

CHATS = {
    "one turn": [{"role": "user", "content": "Hi <b>é😀</b> & 'quotes'"}],
    "turns": [
        {"role": "user", "content": "  Hi\n"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "{{ not a template }}"},
    ],
    "system": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "?", "reasoning": "hm"},
    ],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def transformers_rendering(template, messages, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA, FEATURES], ids=["chatml", "llama", "features"])
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("options", [{}, {"thinking_on": False, "bos_token": "<other>"}], ids=["plain", "extra"])
@pytest.mark.parametrize("generate", [True, False])
def test_rendering_is_transformers(template, messages, options, generate):
    """Breaks: the model gets a prompt it was not trained on, and answers worse without any error."""
    ours = render_chat(template, messages, special_tokens=SPECIAL, add_generation_prompt=generate, **options)
    assert ours == transformers_rendering(template, messages, add_generation_prompt=generate, **options)


def test_chatml_text():
    """Breaks: the generation prompt is off by default, and the model continues the user's turn."""
    messages = [{"role": "user", "content": "Hi"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(CHATML, messages, special_tokens={}) == expected


@pytest.mark.parametrize(
    ("messages", "explanation"),
    [
        ([], "no messages"),
        ("Hi", "pass a list"),
        ({"role": "user", "content": "Hi"}, "pass a list"),
        (["Hi"], "Message 0 is 'Hi'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], 'Message 1 has no "content"'),
        ([{"content": "a"}], 'Message 0 has no "role"'),
        ([{"role": "user", "content": None}], '"content" of message 0 is None'),
        ([{"role": 1, "content": "a"}], '"role" of message 0 is 1'),
        ([{"role": "user", "content": "a", "when": object()}], "JSON values only"),
    ],
)
def test_bad_messages_are_explained(messages, explanation):
    """Breaks: a malformed request gets a Jinja traceback, or a prompt with "None" in it."""
    with pytest.raises(PromptError, match=explanation):
        render_chat(CHATML, messages, special_tokens={})


def test_refusal_of_the_template_is_passed_on():
    """Breaks: the user is not told that the roles must alternate, and begin with the user's."""
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(PromptError, match=r"roles: assistant, user\): roles must alternate"):
        render_chat(LLAMA, messages, special_tokens=SPECIAL)


@pytest.mark.parametrize(
    ("template", "explanation"),
    [
        ("", "no chat template"),
        ("a\n{% if %}", "syntax error in line 2"),
        ("{{ none + 'a' }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ range(10 ** 9) | list }}", "refused"),
    ],
)
def test_bad_templates_are_explained_and_contained(template, explanation):
    """Breaks: a downloaded template crashes the server, changes the caller's messages, or reaches into Python."""
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(PromptError, match=explanation):
        render_chat(template, messages, special_tokens={})
    assert messages == [{"role": "user", "content": "a"}]


def test_lists_of_a_template_may_grow():
    """Breaks: Kimi K2's template, which gathers the turns of its history in a list, is refused; or it changes the caller's."""
    messages, tools = [{"role": "user", "content": "a"}], [{"type": "function"}]
    template = "{% set own = [] %}{% for m in messages %}{% set _ = own.append(m.content) %}{% endfor %}{{ own | join }}"
    template += "{% set _ = messages.append(1) %}{% set _ = tools.append(1) %}"
    assert render_chat(template, messages, special_tokens={}, tools=tools) == "a"
    assert (messages, tools) == ([{"role": "user", "content": "a"}], [{"type": "function"}])


def test_import_is_light():
    """Breaks: the runtime drags in torch, or every start pays for Jinja and tokenizers that it may not need."""
    code = (
        "import sys, tide_runtime.text.chat_template, tide_runtime.sampler, tide_runtime.text.tokenizer;"
        "print([m for m in ('torch', 'transformers', 'jinja2', 'tokenizers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
