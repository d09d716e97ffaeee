"""Calibration text: reading files and data sets, errors for unusable text, splits by document, windows of tokens."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.text.documents import (
    DatasetId,
    Document,
    digest,
    hub_documents,
    load_documents,
    parse_dataset_id,
    split_documents,
    windows,
)
from tide_runtime.errors import DataError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

DEMO = Path(__file__).parents[3] / "examples" / "demo_model"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "layerskip")


def documents(*sizes: int) -> list[Document]:
    """Create different texts of about ``sizes`` tokens."""
    return [Document(f"d{i}", " ".join(f"x{i}" for _ in range(size))) for i, size in enumerate(sizes)]


# --- files


def test_directory_is_read_in_path_order_and_skipped_files_are_reported(tmp_path: Path) -> None:
    """Another order would give other splits on another machine; a silent skip would hide missing text."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.py").write_text("print('ä')", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "zeros.bin").write_bytes(b"abc\x00def")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not calibration text")
    notes: list[str] = []
    found = load_documents(str(tmp_path), notes.append)
    assert [(d.name, d.text) for d in found] == [("a.txt", "first"), ("b/one.py", "print('ä')"), ("rows.jsonl:1", "row")]
    assert [n.split(":")[0] for n in notes] == ["image.png", "zeros.bin"]


def test_jsonl_gives_one_document_per_line(tmp_path: Path) -> None:
    """Blank lines and line separators inside a text must not shift or split documents."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one\u2028still one", "id": 7}\n\n{"text": "two"}\n', encoding="utf-8")
    assert [(d.name, d.text) for d in load_documents(str(file))] == [
        ("rows.jsonl:1", "one\u2028still one"),
        ("rows.jsonl:3", "two"),
    ]


@pytest.mark.parametrize("line", ["{broken", '{"content": "x"}', '{"text": 3}', '["x"]'])
def test_malformed_jsonl_names_the_line(tmp_path: Path, line: str) -> None:
    """Without the line number an error in a file of a million lines cannot be fixed; also for files inside a directory."""
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    for source in (tmp_path / "rows.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"rows\.jsonl:2: .*one JSON object a line"):
            load_documents(str(source))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b" \n\t", "holds no text"), (b"\xff\xfe\x00", "not UTF-8 text"), (b"a\x00b", "not UTF-8 text")],
)
def test_a_file_without_text_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    """Empty or binary input must not lead to a calibration."""
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_documents(str(file))


def test_directory_without_text_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DataError, match="holds no text files"):
        load_documents(str(tmp_path), lambda _: None)


# --- data sets of the hub


@pytest.mark.parametrize("source", ["./gone", "/no/such/dir", "data/of/mine", "gone.txt", "gone.jsonl"])
def test_missing_path_is_not_treated_as_a_data_set(source: str) -> None:
    """A mistyped path must not cause a download from the hub."""
    with pytest.raises(DataError, match="there is no file or directory"):
        load_documents(source)


def test_data_set_without_the_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"no file or directory wikitext.*pip install 'tide-llm\[datasets\]'"):
        load_documents("wikitext:wikitext-2-raw-v1")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[dict] | Exception) -> list[tuple]:
    calls: list[tuple] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict]:
        calls.append((name, config, split))
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_data_set_rows_become_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_datasets(monkeypatch, [{"code": "a = 1"}, {"code": ""}, {"code": "b = 2"}])
    notes: list[str] = []
    found = load_documents("org/set::test:code", notes.append)
    assert calls == [("org/set", None, "test")]
    assert found == [Document("org/set[0]", "a = 1"), Document("org/set[2]", "b = 2")]
    assert "1 empty documents" in notes[0]


def test_reading_stops_at_the_character_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless data set, such as a web crawl, would exhaust the memory."""
    fake_datasets(monkeypatch, [{"text": "0123456789"}] * 100)
    notes: list[str] = []
    assert len(hub_documents("crawl", notes.append, max_characters=25)) == 3
    assert notes == ["crawl: read the first 3 rows, 30 characters"]


def test_unreachable_data_set_is_an_error_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor silently calibrated on built-in sentences instead."""
    fake_datasets(monkeypatch, ConnectionError("no route to huggingface.co"))
    with pytest.raises(DataError, match=r"cannot read the data set wikitex .*no route.*check its name and the network"):
        load_documents("wikitex")


def test_data_set_without_the_column_lists_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"content": "x", "id": 1}])
    with pytest.raises(DataError, match=r"column 'text'; its columns are content, id"):
        load_documents("org/set")


def test_data_set_id_parts() -> None:
    assert parse_dataset_id("org/set") == DatasetId("org/set", None, "train", "text")
    assert parse_dataset_id("set:config:test:code") == DatasetId("set", "config", "test", "code")
    for wrong in ("a:b:c:d:e", "white space", ""):
        with pytest.raises(DataError, match="no data set id"):
            parse_dataset_id(wrong)


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
    """Renaming or reordering files must not move a document from the test split to the train split."""
    texts = documents(*range(50, 90))
    split = split_documents(texts, seed=3)
    renamed = [Document("renamed", d.text) for d in reversed(texts)]
    assert (split_documents(renamed, seed=3)[::-1] == split).all()
    assert (split_documents(texts, seed=4) != split).any()


def test_duplicates_of_a_text_share_a_split() -> None:
    """A duplicate in both train and threshold would invalidate the certificate."""
    texts = documents(40, 50, 60, 70, 80) * 3
    split = split_documents(texts)
    assert (split.reshape(3, 5) == split[:5]).all()


@pytest.mark.parametrize("texts", [documents(5000), documents(5000, 5000), documents(5000) * 9])
def test_too_few_documents_are_counted_in_the_error(texts: list[Document]) -> None:
    found = len({d.text for d in texts})
    with pytest.raises(DataError, match=f"found {found} different documents, but at least 3 are needed"):
        split_documents(texts)


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


def test_too_little_text_reports_found_and_needed_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = documents(4000, 4000, 20)
    with pytest.raises(DataError, match=r"\d+ tokens to test, but each split needs at least 299"):
        windows(texts, np.array([0, 1, 2], np.int8), tokenizer)
