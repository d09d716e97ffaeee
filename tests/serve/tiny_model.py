"""A tiny random chat model for the server's tests, and its bundle. Its template knows tools, tool calls and role ``tool``."""

import json
from pathlib import Path

from tiny_llama import train_tokenizer, write_tiny_llama

from tide_export.config import ExportConfig
from tide_export.export import export

MAX_SEQ_LEN = 512
CHATML = """{% if tools %}
{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' -}}
{% endif %}
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
{% for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}
{% endfor %}
{{- '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"""
CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "The sky is blue. What is the weather in Paris? It is 20 degrees and sunny.",
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
    json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}),
    "user assistant system tool tools",
]


def make_model(directory: Path) -> None:
    tokenizer = train_tokenizer(CORPUS, 400, CHATML, ["<tool_call>", "</tool_call>"])
    write_tiny_llama(directory, tokenizer, 2 * MAX_SEQ_LEN)


def make_bundle(model: Path, out: Path) -> None:
    """Export the model in directory ``model`` with the real exporter."""
    export(str(model), out, ExportConfig(checkpoints="1,3", max_seq_len=MAX_SEQ_LEN, verify=False, targets=("cpu",)))
