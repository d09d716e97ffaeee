"""The demo models' calibration text comes from the standard library of the Python in use, or the user learns what to install."""

from pathlib import Path

import pytest
from cli_in_process import cli_runner
from tide_runtime.cli.errors import run_app
from tide_runtime.errors import DataError, OutputError

from examples import demo_data
from examples.demo_data import MIN_FILES, held_out_files, listed_paths, write_held_out
from examples.demo_training.corpus import is_held_out


def make_library(folder: Path, paths: list[str]) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f'"""ä {path}"""\n', encoding="utf-8")
    return folder


def test_every_listed_file_was_held_out_from_training() -> None:
    """Calibration and benchmarks would look better than they are on text that the models learned."""
    assert all(is_held_out(path) for path in listed_paths())
    assert len(set(listed_paths())) == len(listed_paths()) >= MIN_FILES


def test_a_stripped_library_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    """The calibration would go on with a few files, and its certificate would be about those."""
    enough = make_library(tmp_path / "enough", listed_paths()[:MIN_FILES])
    assert len(held_out_files(enough)) == MIN_FILES
    (enough / listed_paths()[0]).unlink()
    with pytest.raises(DataError, match=rf"enough has {MIN_FILES - 1} of the \d+ files .*apt install python3-full"):
        held_out_files(enough)
    with pytest.raises(DataError, match="nowhere has 0 of"):
        write_held_out(tmp_path / "out", tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_the_command_ends_with_code_2_where_the_library_is_stripped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user would see a traceback, and `make demo` would go on without text."""
    run = cli_runner("demo_data", lambda: run_app(demo_data.app), monkeypatch, capsys, columns=200)
    done = run(tmp_path / "data")
    assert done.code == 0 and "held-out files are in" in done.out
    monkeypatch.setattr(demo_data, "library_folders", lambda: {"stdlib": tmp_path / "stripped"})
    done = run(tmp_path / "data")
    assert done.code == 2 and "apt install python3-full" in done.err and "Traceback" not in done.err


def test_a_folder_is_written_again_but_never_one_with_other_files(tmp_path: Path) -> None:
    """A user's own files would be deleted, or those of another Python's library would stay among the new ones."""
    out = tmp_path / "data"
    write_held_out(out, make_library(tmp_path / "all", listed_paths()))
    written = write_held_out(out, make_library(tmp_path / "fewer", listed_paths()[3:]))
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(written)
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(OutputError, match=r"other files \(mine.txt\)"):
        write_held_out(out)
    assert (out / "mine.txt").exists()
    with pytest.raises(OutputError, match="is a file"):
        write_held_out(out / "mine.txt")
