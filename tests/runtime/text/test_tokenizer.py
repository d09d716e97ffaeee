"""Streamed text must be the decoded text, cut at stop strings, without broken characters, at constant cost."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_runtime.errors import BundleError, PromptError
from tide_runtime.text.tokenizer import REPLACEMENT, TextStream, Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "les élèves où ça", "你好，世界", "a 😀 and a 👩‍🚀 here"]


def byte_level() -> Tokenizer:
    """GPT-2's kind: merges of bytes, so one character may be spread over tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


def sentencepiece(decoder) -> Tokenizer:
    """Llama-2's kind: words begin with ▁, unknown characters fall back to byte tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijk",
        "ab",
        "▁ab",
        "▁▁",
    ]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend)


LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
BYTES = byte_level()
PIECES = {"llama": sentencepiece(LLAMA), "metaspace": sentencepiece(METASPACE)}
EVERY = {"bytes": BYTES, **PIECES}
every_tokenizer = pytest.mark.parametrize("tokenizer", EVERY.values(), ids=EVERY.keys())

texts = st.text(st.sampled_from("ab  éß你好😀👩\u200d🚀\ufffd\n#."), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab #é😀"), min_size=1, max_size=4), max_size=3)


def cut(text, stops):
    """`text` before the first stop string to be completed, and that stop string."""
    ends = [(text.index(s) + len(s), text.index(s), s) for s in stops if s in text]
    return (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)


def assert_streams(tokenizer, ids, stops=(), skip_special_tokens=True):
    stream = TextStream(tokenizer, stops, skip_special_tokens)
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.flush())
    assert ("".join(pieces), stream.stop_hit) == cut(tokenizer.continuation(ids, skip_special_tokens), stops)
    assert stream.finished


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(text=texts, stops=stops)
def test_streamed_text_is_the_decoded_text(tokenizer, text, stops):
    """Breaks: streamed output loses spaces or characters, or shows text after a stop string."""
    assert_streams(tokenizer, tokenizer.encode(text), stops)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=40), stops=stops, skip=st.booleans())
def test_any_byte_level_ids_stream_as_they_decode(ids, stops, skip):
    """Breaks: a model that emits invalid bytes, special tokens or padding ids makes the stream lose text."""
    assert_streams(BYTES, ids, stops, skip)


@pytest.mark.parametrize("tokenizer", PIECES.values(), ids=PIECES.keys())
@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_pieces_stream_as_they_decode(tokenizer, data, skip):
    """Breaks: leading spaces vanish after a special token, or at the start of a line."""
    ids = data.draw(st.lists(st.sampled_from([1, 2, *range(259, tokenizer.vocab_size)]), max_size=30))
    assert_streams(tokenizer, ids, (), skip)


@pytest.mark.parametrize("tokenizer", PIECES.values(), ids=PIECES.keys())
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_invalid_byte_fallback_loses_no_text(tokenizer, data):
    """Breaks: one bad byte token swallows or repeats the words around it."""
    some_bytes = [3 + byte for byte in (0x80, 0x98, 0x9F, 0xC3, 0xE2, 0xF0, 0xFF)]
    ids = data.draw(st.lists(st.sampled_from([*some_bytes, *range(259, tokenizer.vocab_size)]), max_size=30))
    stream = TextStream(tokenizer)
    streamed = "".join([stream.push(token) for token in ids] + [stream.flush()])
    assert [c for c in streamed if c.isascii()] == [c for c in tokenizer.continuation(ids) if c.isascii()]


@every_tokenizer
def test_no_broken_character_is_shown(tokenizer):
    """Breaks: a terminal shows � for a moment where an emoji is coming."""
    ids = tokenizer.encode("ab 😀你 👩‍🚀é")
    text, stream, shown = tokenizer.continuation(ids), TextStream(tokenizer), ""
    for token in ids:
        shown += stream.push(token)
        assert text.startswith(shown) and REPLACEMENT not in shown
    assert shown == text


class CountingTokenizer(Tokenizer):
    """Remembers the most ids it had to decode at once."""

    most = 0

    def decode(self, ids, skip_special_tokens=True):
        self.most = max(self.most, len(ids))
        return super().decode(ids, skip_special_tokens)


@every_tokenizer
@pytest.mark.parametrize("byte", [None, 0xFF, 0xE2, 0x82])
def test_cost_of_a_token_does_not_grow(tokenizer, byte):
    """Breaks: long outputs, or a model stuck on invalid bytes, slow down with every token, or show nothing."""
    counting = CountingTokenizer(tokenizer._backend)
    one = _byte_token(counting, byte) if byte else counting.encode("a", add_special_tokens=False)[-1]
    stream = TextStream(counting)
    shown = "".join(stream.push(one) for _ in range(300))
    assert counting.most <= 12 and len(shown) > 280


def _byte_token(tokenizer, byte):
    for token_id in range(tokenizer.vocab_size):
        if tokenizer.token(token_id) == f"<0x{byte:02X}>":
            return token_id
    # GPT-2's byte alphabet: bytes from 0xAE on stand for themselves, 0x82 is the 67th of the others.
    letter = chr(byte) if byte >= 0xAE else chr(256 + 33 + byte - 0x7F)
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == letter)


def push_text(stream, text):
    return [stream.push(token) for token in BYTES.encode(text, add_special_tokens=False)]


def test_possible_stop_is_held_until_it_is_certain():
    """Breaks: half of a stop string flashes up before the text ends; or text that only looked like one is lost."""
    stream = TextStream(BYTES, ["#b#"])
    assert "".join(push_text(stream, "a#b")) == "a" and not stream.finished
    assert "".join(push_text(stream, "x#b")) == "#bx"
    assert "".join(push_text(stream, "#")) == "" and stream.stop_hit == "#b#" and stream.finished
    assert push_text(stream, "more")[0] == "" and stream.flush() == ""


def test_stop_is_found_where_it_restarts():
    """Breaks: a stop string whose beginning repeats (aab in aaab) is missed."""
    stream = TextStream(BYTES, ["##b"])
    assert "".join(push_text(stream, "x###b")) == "x#" and stream.stop_hit == "##b"


def test_first_completed_stop_wins_whatever_the_tokens():
    """Breaks: with two stop strings, where the text ends depends on how it was tokenised."""
    assert cut("abcd", ["abcd", "bc"]) == ("a", "bc")
    stream = TextStream(BYTES, ["abcd", "bc"])
    assert "".join(push_text(stream, "abcd")) == "a" and stream.stop_hit == "bc"


@pytest.mark.parametrize("tokenizer", PIECES.values(), ids=PIECES.keys())
def test_a_continuation_begins_with_the_space_of_its_first_token(tokenizer):
    """Breaks: "The capital is" is continued with "Paris", so prompt and text, joined, are one word."""
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert (tokenizer.decode(ids), tokenizer.continuation(ids)) == ("ab ab", " ab ab")
    assert tokenizer.continuation([1, *ids[:1]]) == " ab" and tokenizer.continuation([]) == ""
    stream = TextStream(tokenizer, [" ab"])
    assert (stream.push(ids[0]), stream.stop_hit) == ("", " ab")


def test_a_tokenizer_that_keeps_spaces_needs_no_lead():
    """Breaks: every token of a byte-level vocabulary is decoded twice."""
    assert BYTES.lead == () and BYTES.continuation(BYTES.encode(" the")) == " the"


@every_tokenizer
@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_spell_special_tokens(tokenizer, skip):
    """Breaks: stop: ["<s>"] is ignored, because the text leaves special tokens out before stop strings are looked for."""
    special = tokenizer.encode("<s>", add_special_tokens=False)[-1]
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab")
    for stop, ids, text in (
        ("<s>", [a, special, b], "a"),
        ("b<s>a", [a, b, special, a], "a"),
        ("a<s>", [special, a, special], ""),
    ):
        stream = TextStream(tokenizer, ["never", stop], skip)
        pieces = [stream.push(token) for token in ids] + [stream.flush()]
        assert ("".join(pieces).replace("<s>", ""), stream.stop_hit) == (text, stop)


def test_special_tokens_of_a_stop_string_are_left_out_of_the_text():
    """Breaks: signs of special tokens get into a text that goes on, or a pending character is lost at one."""
    stream = TextStream(BYTES, ["<s>b"])
    assert stream.push(0) == "" and "".join(push_text(stream, "é")) == "é"
    first = BYTES.encode("😀", add_special_tokens=False)[0]
    assert "".join([stream.push(first), stream.push(0), *push_text(stream, "a"), stream.flush()]) == "\ufffda"
    assert stream.stop_hit is None
    spelled = TextStream(BYTES, ["<s>"])  # with other tokens than the special one
    letters = [next(i for i in range(BYTES.vocab_size) if BYTES.token(i) == letter) for letter in "a<s>"]
    assert "".join(map(spelled.push, letters)) == "a" and spelled.stop_hit == "<s>"


def test_special_tokens_that_are_shown():
    """Breaks: calls of tools, which models mark with special tokens, cannot be told from text."""
    stream = TextStream(BYTES, shown=[1])
    ids = [0, 1, *BYTES.encode("the", add_special_tokens=False), 1, 0]
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == "<|end|>the<|end|>"


def test_encode_adds_the_models_special_tokens_once():
    """Breaks: the prompt lacks its BOS, or a rendered chat has two."""
    assert BYTES.encode("the")[0] == 0 and BYTES.encode("the", add_special_tokens=False)[0] != 0
    assert BYTES.decode(BYTES.encode("the fox")) == "the fox"
    assert BYTES.decode(BYTES.encode("the fox"), skip_special_tokens=False) == "<s>the fox"


def test_truncation_of_training_is_not_applied():
    """Breaks: long prompts are cut, or short ones padded, because the tokenizer.json was saved mid-training."""
    backend = tokenizers.Tokenizer.from_str(BYTES._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=500)
    assert Tokenizer(backend).encode(CORPUS[0]) == BYTES.encode(CORPUS[0])


def test_vocabulary_lookup():
    """Breaks: reported log-probabilities have no token names, or padding ids crash them."""
    assert BYTES.token(0) == "<s>" and BYTES.token(BYTES.vocab_size) is None
    assert BYTES.decode([BYTES.vocab_size + 1]) == ""


def test_bad_files_and_input_are_explained(tmp_path):
    """Breaks: a damaged bundle or a surrogate in a prompt ends in a traceback from Rust."""
    with pytest.raises(BundleError, match="No tokenizer at"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="not a readable"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(PromptError, match="Unicode"):
        BYTES.encode("a\ud800")
    with pytest.raises(PromptError, match=">= 0"):
        BYTES.decode([-1])
