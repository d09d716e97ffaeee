"""A tiny random chat model for the server's tests, and its bundle. Its template knows tools, tool calls and role ``tool``."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tide_export.config import ExportConfig
from tide_export.export import export

MAX_SEQ_LEN = 512
EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
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
    """Write the model as its authors would publish it: config, safetensors, tokenizer, chat template, generation config."""
    torch.set_num_threads(1)  # more only get in each other's way on a model this small
    tokenizer = _train_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # padded, as published models often are
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_SEQ_LEN,
        initializer_range=0.3,  # lively: text does not fall into a loop at once
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_bundle(model: Path, out: Path) -> None:
    """Export the model in directory ``model`` with the real exporter."""
    export(str(model), out, ExportConfig(checkpoints="1,3", max_seq_len=MAX_SEQ_LEN, verify=False, targets=("cpu",)))


def _train_tokenizer() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool_call>", "</tool_call>"])  # as in Qwen's and SmolLM3's vocabulary: tokens that are text
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=EOS, eos_token=EOS)
    tokenizer.chat_template = CHATML
    return tokenizer
