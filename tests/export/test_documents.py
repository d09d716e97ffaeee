"""Reading text: files, directories and data sets, and errors for what is no text."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tide_runtime.errors import DataError

from tide_export.documents import DatasetId, Document, hub_documents, load_documents, parse_dataset_id

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


def test_data_set_id_parts() -> None:
    assert parse_dataset_id("org/set") == DatasetId("org/set", None, "train", "text")
    assert parse_dataset_id("set:config:test:code") == DatasetId("set", "config", "test", "code")
    for wrong in ("a:b:c:d:e", "white space", ""):
        with pytest.raises(DataError, match="no data set id"):
            parse_dataset_id(wrong)
