"""Text, bytes and offsets of single tokens, for vocabularies of both kinds."""

import pytest
import tokenizers
from serve.live import Served
from tide_runtime.sampler import TokenLogprob
from tide_runtime.text.tokenizer import Tokenizer
from tide_serve.api.logprobs import TextOffsets, TokenTexts, completion_logprobs


def sentencepiece() -> Tokenizer:
    """A vocabulary as Llama 2 has it: ▁ for a space, bytes as <0x..>."""
    vocab = {"<unk>": 0, "▁Hi": 1, "▁": 2, "a": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    return Tokenizer(backend)


def test_bytes_of_a_byte_level_vocabulary(served: Served) -> None:
    """Breaks: log-probabilities show Ġ for a space, or characters for the bytes of another one."""
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    texts, text = TokenTexts(tokenizer), "def add é\n😀 </tool_call>"
    ids = tokenizer.encode(text)
    assert b"".join(map(texts.bytes_of, ids)).decode() == text
    assert texts.text_of(ids[1]) == " add" and texts.text_of(0) == "<|endoftext|>"
    assert texts.text_of(tokenizer.encode("é")[0]) == "bytes:\\xc3"
    assert texts.text_of(10**6) == "<token 1000000>"


def test_offsets_count_characters_across_calls(served: Served) -> None:
    """Breaks: offsets of a stream begin anew in each event, or count bytes."""
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("aé😀b")
    whole = TextOffsets(texts, tokenizer).of(ids)
    assert [offset for _, offset in whole] == [0, 1, 1, 2, 2, 2, 2, 3]
    pieces = TextOffsets(texts, tokenizer)
    assert [place for token in ids for place in pieces.of([token])] == whole


def assert_places(text: str, places: list[tuple[str, int]]) -> None:
    for shown, offset in places:
        assert shown.startswith("bytes:") or text[offset : offset + len(shown)] == shown, (text, places)


@pytest.mark.parametrize("sent", ["Hi", "a é\u20aca", "\u20ac\u20ac", "Hi\ufffda"])
def test_offsets_point_into_the_text(served: Served, sent: str) -> None:
    """Breaks: text[offset:offset + len(token)] is another token's text, with either kind of vocabulary."""
    for tokenizer in (served.engine.tokenizer, sentencepiece()):
        assert tokenizer is not None
        texts, ids = TokenTexts(tokenizer), tokenizer.encode(sent)
        assert_places(tokenizer.continuation(ids), TextOffsets(texts, tokenizer).of(ids))
        for prompt in (sent, tokenizer.decode(ids)):
            offsets = TextOffsets(texts, tokenizer)
            prompt_places = offsets.of_prompt(ids, prompt)
            assert_places(prompt + tokenizer.continuation(ids), prompt_places + offsets.of(ids))


def test_offsets_of_tokens_that_the_text_leaves_out(served: Served) -> None:
    """Breaks: special tokens, which the text does not have, move the offsets of what follows."""
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    texts, (letter,) = TokenTexts(tokenizer), tokenizer.encode("a")
    ids = [1, letter, 2, letter, 0]
    assert TextOffsets(texts, tokenizer).of(ids) == [
        ("<|im_start|>", 0), ("a", 0), ("<|im_end|>", 1), ("a", 1), ("<|endoftext|>", 2),
    ]  # fmt: skip
    assert [offset for _, offset in TextOffsets(texts, tokenizer).of_prompt(ids, "aa")] == [0, 0, 1, 1, 2]
    assert [offset for _, offset in TextOffsets(texts, tokenizer).of_prompt(ids, "<|im_start|>aa")] == [0, 12, 13, 13, 14]


def test_of_tokens_with_the_same_text_the_likeliest_counts() -> None:
    """Breaks: a likely token disappears from top_logprobs behind an unlikely one, and clients compare with that."""
    texts, byte = TokenTexts(sentencepiece()), 4 + ord("a")
    entry = TokenLogprob(byte, -5.0, ((3, -0.1), (byte, -5.0)))
    assert completion_logprobs([entry], 2, texts, [("a", 0)])["top_logprobs"] == [{"a": -0.1}]
