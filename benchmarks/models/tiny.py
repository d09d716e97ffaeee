"""A Llama of four layers with random weights, exported: small enough for ten thousands of requests."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.bundles import export_bundle
from tide_bench.in_process import run_in_process

VOCABULARY = 128
MAX_SEQ_LEN = 128
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, fp32


def tiny_bundle(cache: Path) -> Path:
    """The bundle, kept in the folder ``cache``. It has no tokenizer, and exits nowhere."""
    identity = f"{files_digest([Path(__file__)])} torch {version('torch')}"
    weights = cached_folder(cache / "tiny" / "weights", identity, lambda folder: run_in_process(_write, folder))
    return export_bundle(weights, identity, cache / "tiny" / "bundle", max_seq_len=MAX_SEQ_LEN)


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
