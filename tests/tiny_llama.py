"""A tiny random Llama with a tokenizer and a chat template, as its authors would publish it."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(
    corpus: Sequence[str], vocab_size: int, chat_template: str, added: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; ``added``: tokens that are text, as calls of tools in Qwen's vocabulary."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens(list(added))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=EOS, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def write_tiny_llama(directory: Path, tokenizer: PreTrainedTokenizerFast, max_positions: int) -> Path:
    """Write config, safetensors, tokenizer, chat template and generation config."""
    torch.set_num_threads(1)  # more only get in each other's way on a model this small
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # padded, as published models often are
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,  # lively: text does not fall into a loop at once
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
