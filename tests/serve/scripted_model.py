"""A tiny model that says what a test wants: its next token depends on the last one only, so answers are chains of tokens.

Its tokenizer is of Llama 2's kind: words begin with ▁, characters without a token are bytes, and the decoder drops the first
space.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tide_export.config import ExportConfig
from tide_export.export import export

VOCAB = 512  # of the model; the tokenizer has fewer tokens
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
TEMPLATE = "{% for message in messages %}{{ message.content or '' }}{% endfor %}"


def make_scripted_bundle(
    directory: Path,
    answers: Mapping[str, Sequence[str | int]],
    words: Sequence[str] = (),
    special: Sequence[str] = (),
    template: str = TEMPLATE,
) -> Path:
    """The bundle, in ``directory``, of a model that answers what ends with a key of ``answers`` with its value.

    Args:
        answers: text of tokens, and bytes as integers. No token may have two tokens behind it.
        words: of prompts, each a token.
        special: special tokens besides those for begin, end and unknown words.
        template: of chats.
    """
    tokenizer = _tokenizer(answers, words, special)
    vocab = tokenizer.get_vocab()
    following: dict[int, int] = {}
    for start, answer in answers.items():
        ids = [vocab[_entry(piece)] for piece in (start, *answer, EOS)]
        for last, following_id in pairwise(ids):
            assert following.setdefault(last, following_id) == following_id, f"two tokens behind {tokenizer.id_to_token(last)!r}"
    source = directory / "source"
    _model(following, vocab[EOS]).save_pretrained(source)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN)
    fast.chat_template = template
    fast.save_pretrained(source)
    config = ExportConfig(checkpoints="none", max_seq_len=512, verify=False, targets=("cpu",))
    export(str(source), directory / "bundle", config)
    return directory / "bundle"


def _entry(piece: str | int) -> str:
    return piece.replace(" ", "▁") if isinstance(piece, str) else f"<0x{piece:02X}>"


def _tokenizer(answers: Mapping[str, Sequence[str | int]], words: Sequence[str], special: Sequence[str]) -> tokenizers.Tokenizer:
    pieces = [piece for start, answer in answers.items() for piece in (start, *answer)]
    entries = [UNKNOWN, BOS, EOS, *special, *map(_entry, range(256)), *"abc", *map(_entry, (*words, *pieces))]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(dict.fromkeys(entries))}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (UNKNOWN, BOS, EOS, *special)])
    tokenizer.add_tokens([AddedToken(start, normalized=False) for start in answers if not start.startswith(" ")])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def _model(following: Mapping[int, int], eos: int) -> LlamaForCausalLM:
    """A Llama whose layer adds nothing to one-hot embeddings, which the head maps to the next token; of one structure, which is
    traced once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=VOCAB, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = eos
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, next_id in following.items():
            model.lm_head.weight[next_id, last] = 1
    return model
