"""Calibration text: splits by document, windows of tokens."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.text.documents import digest, split_documents, windows
from tide_runtime.errors import DataError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tide_export.documents import Document, load_documents

DEMO = Path(__file__).parents[3] / "examples" / "demo_model"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "layerskip")


def documents(*sizes: int) -> list[Document]:
    """Create different texts of about ``sizes`` tokens."""
    return [Document(f"d{i}", " ".join(f"x{i}" for _ in range(size))) for i, size in enumerate(sizes)]


# --- splits


@given(st.lists(st.integers(1, 400), min_size=3, max_size=30), st.integers(0, 1000))
def test_every_split_gets_documents_and_its_share(sizes: list[int], seed: int) -> None:
    """An empty threshold split certifies nothing; an unbalanced one wastes text."""
    texts = documents(*sizes)
    split = split_documents(texts, seed)
    assert set(split) == {0, 1, 2}
    size = np.array([len(d.text.encode()) for d in texts])
    for index, fraction in enumerate((0.6, 0.2, 0.2)):
        assert abs(size[split == index].sum() - fraction * size.sum()) <= 2 * size.max()


def test_splits_depend_on_content_and_seed_only() -> None:
    """Renaming or reordering files must not move a document to another split, nor a duplicate be in train and threshold."""
    texts = documents(*range(50, 90))
    split = split_documents(texts, seed=3)
    renamed = [Document("renamed", d.text) for d in reversed(texts)]
    assert (split_documents(renamed, seed=3)[::-1] == split).all()
    assert (split_documents(texts, seed=4) != split).any()
    split = split_documents(documents(40, 50, 60, 70, 80) * 3)
    assert (split.reshape(3, 5) == split[:5]).all()


def test_too_little_text_is_counted_in_the_error(tokenizer: PreTrainedTokenizerFast) -> None:
    for count, texts in ((1, documents(5000)), (2, documents(5000, 5000)), (1, documents(5000) * 9)):
        with pytest.raises(DataError, match=f"found {count} different documents, but at least 3 are needed"):
            split_documents(texts)
    with pytest.raises(DataError, match=r"\d+ tokens to test, but each split needs at least 299"):
        windows(documents(4000, 4000, 20), np.array([0, 1, 2], np.int8), tokenizer)


def test_digest_depends_on_the_texts_only() -> None:
    """The certificate identifies its data by the digest: the same files elsewhere must match, edited ones must not."""
    texts = documents(10, 20, 30)
    assert digest(texts) == digest([Document("other/name", d.text) for d in reversed(texts)])
    assert digest(texts) != digest([*texts[:2], Document("d2", texts[2].text + ".")])
    assert digest([Document("", "ab"), Document("", "c")]) != digest([Document("", "a"), Document("", "bc")])


# --- windows


def test_windows_hold_every_token_of_a_document_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    """Lost or repeated text would bias the measured agreement."""
    texts = load_documents(str(Path(sysconfig.get_path("stdlib"), "asyncio", "threads.py"))) + documents(300, 400, 500)
    cut = windows(texts, split_documents(texts), tokenizer, length=256)
    assert cut.tokens.shape[1] == 256 and (np.diff(cut.document) >= 0).all()
    for index in range(len(texts)):
        ids = tokenizer(texts[index].text, add_special_tokens=False)["input_ids"]
        rows = np.flatnonzero(cut.document == index)
        joined = np.concatenate([cut.tokens[row, : cut.lengths[row]] for row in rows])
        assert joined.tolist() == ids[: len(joined)] and len(ids) - len(joined) < 16
        assert all(cut.tokens[row, cut.lengths[row] :].sum() == 0 for row in rows)


def test_a_limit_samples_all_splits_and_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    """The first 2,000 windows would cover only the first few files."""
    texts = [Document(f"d{i}", "".join(f"{i}.{n} " for n in range(300 + 20 * i))) for i in range(20)]
    split = split_documents(texts)
    everything = windows(texts, split, tokenizer, length=32)
    some = windows(texts, split, tokenizer, length=32, limit=100)
    assert len(some.tokens) == 100 and len(np.unique(some.tokens, axis=0)) == 100
    share = np.bincount(split[some.document], minlength=3) / 100
    assert np.abs(share - np.bincount(split[everything.document]) / len(everything.tokens)).max() < 0.02
    assert len(set(some.document)) == len(texts)
    assert (windows(texts, split, tokenizer, length=32, limit=100).tokens == some.tokens).all()
    assert (windows(texts, split, tokenizer, length=32, limit=100, seed=1).tokens != some.tokens).any()


def test_every_window_begins_with_the_prompt_prefix(tokenizer: PreTrainedTokenizerFast) -> None:
    """Some models (Gemma) behave differently without BOS, so heads trained without it would not fit at run time."""
    post = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = post
    texts = documents(600, 601, 602)
    cut = windows(texts, np.array([0, 1, 2], np.int8), tokenizer, length=64)
    assert (cut.tokens[:, 0] == 0).all() and (cut.tokens[cut.lengths == 64, 1:] != 0).all()
