"""A Llama of four layers with random weights, exported: small enough for ten thousands of requests."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.bundles import export_bundle
from tide_bench.in_process import run_in_process

VOCABULARY = 128  # one token for each ASCII character, where there is a tokenizer
MAX_SEQ_LEN = 128
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, fp32


def tiny_bundle(cache: Path) -> Path:
    """The bundle, kept in the folder ``cache``. It has no tokenizer, and exits nowhere."""
    identity = f"{files_digest([Path(__file__)])} torch {version('torch')}"
    weights = cached_folder(cache / "tiny" / "weights", identity, lambda folder: run_in_process(_write, folder))
    return export_bundle(weights, identity, cache / "tiny" / "bundle", max_seq_len=MAX_SEQ_LEN)


def tiny_chat_bundle(cache: Path) -> Path:
    """The bundle of the same model with a tokenizer and a chat template, cut after two layers."""
    identity = f"{files_digest([Path(__file__)])} torch {version('torch')}"
    weights = cached_folder(cache / "tiny_chat" / "weights", identity, lambda folder: run_in_process(_write_chat, folder))
    return export_bundle(weights, identity, cache / "tiny_chat" / "bundle", checkpoints="2", max_seq_len=MAX_SEQ_LEN)


def _write_chat(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    _write(folder)
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE({spelling.pre_tokenize_str(chr(byte))[0][0]: byte for byte in range(VOCABULARY)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = spelling, decoders.ByteLevel()
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    chat.chat_template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    chat.save_pretrained(folder)


def _write(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_SEQ_LEN,
        initializer_range=0.3,  # text does not fall into a loop at once
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
