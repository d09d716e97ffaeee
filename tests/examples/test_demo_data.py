"""The demo models' calibration text comes from the standard library of the Python in use, or the user learns what to install."""

from pathlib import Path

import pytest
from cli_in_process import cli_runner
from tide_runtime.cli.errors import run_app
from tide_runtime.errors import DataError, OutputError

from examples import demo_data, demo_exits
from examples.demo_data import MIN_FILES, held_out_files, listed_paths, write_held_out
from examples.demo_training.corpus import is_held_out
from tide_export.documents import load_documents


def make_library(folder: Path, paths: list[str]) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f'"""ä {path}"""\n', encoding="utf-8")
    return folder


def test_every_listed_file_was_held_out_from_training() -> None:
    """Calibration and benchmarks would look better than they are on text that the models learned."""
    assert all(is_held_out(path) for path in listed_paths())
    assert len(set(listed_paths())) == len(listed_paths()) >= MIN_FILES


def test_this_python_has_enough_files_and_the_calibration_reads_all_of_them(tmp_path: Path) -> None:
    """`make demo` would fail, or calibrate on other text than the list names."""
    files = held_out_files()
    write_held_out(tmp_path / "data")
    assert [(d.name, d.text) for d in load_documents(str(tmp_path / "data"))] == [(f.path, f.text) for f in files]


def test_order_is_that_of_paths_whatever_the_file_system_says(tmp_path: Path) -> None:
    """Prompts of benchmarks would differ between two machines with the same Python."""
    library = make_library(tmp_path, listed_paths()[::-1])
    assert [file.path for file in held_out_files(library)] == sorted(listed_paths())


def test_files_that_a_newer_python_lacks_are_left_out_and_unlisted_ones_are_not_read(tmp_path: Path) -> None:
    """The demo would stop with Python 3.12, which has no distutils, or read a moved file that the models were trained on."""
    gone = {"distutils/__init__.py", "distutils/cmd.py", "lib2to3/fixes/fix_set_literal.py", "crypt.py", "uu.py", "xdrlib.py"}
    kept = [path for path in listed_paths() if path not in gone]
    moved = next(f"moved_{number}.py" for number in range(1000) if is_held_out(f"moved_{number}.py"))
    library = make_library(tmp_path, [*kept, moved])
    assert gone < set(listed_paths())
    assert [file.path for file in held_out_files(library)] == kept


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


def test_the_demos_prompt_is_code_of_a_held_out_file() -> None:
    """The model would continue a licence text or a docstring."""
    (source,) = [file.text for file in held_out_files() if file.path == demo_exits.PROMPT_FILE.name]
    prompt = demo_exits._prompt(source)
    assert prompt.startswith("import ") and "def " in prompt and prompt in source
