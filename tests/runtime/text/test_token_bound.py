"""The fewest tokens of a text: a bound above the true number would refuse prompts that fit."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.text.test_tokenizer import BYTES, PIECES
from tide_runtime.text.token_bound import TokenBound
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

Backend = tokenizers.Tokenizer
TEXT = "the fox 12345 é你😀 \n  e\u0301 <tag>" * 20


def plain() -> Backend:
    return Backend.from_str(BYTES._backend.to_str())


def changed(**parts: object) -> Callable[[], Backend]:
    """GPT-2's kind of tokenizer with other ``parts``."""

    def make() -> Backend:
        backend = plain()
        for name, part in parts.items():
            setattr(backend, name, part)
        return backend

    return make


def with_added(**options: bool) -> Callable[[], Backend]:
    def make() -> Backend:
        backend = plain()
        backend.add_tokens([AddedToken("<a long tag of a vocabulary>", **options), AddedToken("<tag>", **options)])
        return backend

    return make


def words() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def without_a_byte() -> Backend:
    alphabet = {character: token for token, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:-1])}
    return changed(model=models.BPE(alphabet, []))()


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
SPLIT = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+"), "isolated")
BOUNDED: dict[str, Callable[[], Backend]] = {
    "GPT-2": plain,
    "SmolLM2": changed(pre_tokenizer=pre_tokenizers.Sequence([DIGITS, LEVEL])),
    "Llama 3": changed(pre_tokenizer=pre_tokenizers.Sequence([SPLIT, LEVEL])),
    "Qwen": changed(normalizer=normalizers.NFC()),
    "added tokens": with_added(),
}
UNBOUNDED: dict[str, Callable[[], Backend]] = {
    "Llama 2": lambda: PIECES["llama"]._backend,
    "BERT": words,
    "strips the text": changed(normalizer=normalizers.Strip()),
    "composes more than NFC": changed(normalizer=normalizers.NFKC()),
    "removes spaces": changed(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), LEVEL]),
    ),
    "an unknown step": changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL])),
    "no bytes": changed(pre_tokenizer=None),
    "a byte is missing": without_a_byte,
    "tokens that take the space on their left": with_added(lstrip=True),
    "tokens that take the space on their right": with_added(rstrip=True),
}


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | st.text(st.sampled_from("the fox 12e\u0301é你 <tag>"), max_size=60), times=st.integers(1, 9))
def test_no_text_has_fewer_tokens(make: Callable[[], Backend], text: str, times: int) -> None:
    """Breaks: a prompt that fits the context is refused."""
    backend = make()
    assert TokenBound.of(backend).fewest_tokens(text * times) <= len(backend.encode(text * times, add_special_tokens=False).ids)


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
def test_the_bound_is_reached(make: Callable[[], Backend]) -> None:
    """Breaks: the bound is so low that no text is refused early."""
    bound = TokenBound.of(make())
    longest = max(make().get_vocab(), key=len)
    assert bound.longest == len(longest) and bound.fewest_tokens("x" * (10 * len(longest) + 1)) == 11


def test_an_added_token_counts_as_one() -> None:
    """Breaks: a text of long added tokens, each of them one token, is refused."""
    backend = with_added()()
    text = "<a long tag of a vocabulary>" * 50
    assert TokenBound.of(backend).fewest_tokens(text) == len(backend.encode(text, add_special_tokens=False).ids) == 50


@pytest.mark.parametrize("make", UNBOUNDED.values(), ids=UNBOUNDED)
def test_no_bound_where_a_token_may_cover_any_length(make: Callable[[], Backend]) -> None:
    """Breaks: a long run of spaces or of unknown characters, which is few tokens, is refused."""
    assert TokenBound.of(make()).fewest_tokens(TEXT) == 0


def test_only_ascii_is_bounded_where_characters_are_composed() -> None:
    """Breaks: text in decomposed Unicode, which NFC makes shorter, is refused."""
    bound = TokenBound.of(BOUNDED["Qwen"]())
    assert bound.fewest_tokens("e\u0301" * 1000) == 0 < bound.fewest_tokens("e" * 1000)
