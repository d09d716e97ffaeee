"""Text to calibrate the demo models on: files of Python's standard library that were held out from their training.

    python -m examples.demo_data build/demo-data
    tide-calibrate examples/demo_model/layerskip --data build/demo-data --out calib/

`demo_model/held_out.txt` lists the files; their text comes from the standard library of the Python in use. Published figures
were measured with the text of CPython 3.11.7; another version's text differs a little, and some files are gone from newer ones.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from tide_runtime.cli.errors import run_app
from tide_runtime.errors import DataError, OutputError

from examples.demo_training.corpus import SourceFile, library_folders

_LIST = Path(__file__).parent / "demo_model" / "held_out.txt"
# Python 3.13 without IDLE and tkinter, which Linux distributions package apart, still has 13 of the files.
MIN_FILES = 12


def listed_paths() -> list[str]:
    """Paths of the held-out files relative to the standard library's folder, sorted."""
    lines = _LIST.read_text(encoding="utf-8").splitlines()
    return sorted(line for line in lines if line and not line.startswith("#"))


def held_out_files(library: Path | None = None) -> list[SourceFile]:
    """The held-out files of the standard library in the order of their paths, without those that this Python lacks.

    Only listed files are read: a file that a newer Python has moved would be held out by its new path's hash, although the
    models were trained on its text.

    Args:
        library: folder of the standard library; by default that of the Python in use.

    Raises:
        DataError: the folder has fewer than ``MIN_FILES`` of the files.
    """
    library = library or library_folders()["stdlib"]
    paths = listed_paths()
    found = [path for path in paths if (library / path).is_file()]
    if len(found) < MIN_FILES:
        raise DataError(
            f"{library} has {len(found)} of the {len(paths)} files in {_LIST.name}, at least {MIN_FILES} are needed: this Python "
            "lacks sources of its standard library; on Debian or Ubuntu run `apt install python3-full` (or libpython3-stdlib), "
            "elsewhere use a Python from python.org, uv or conda"
        )
    return [SourceFile(path, (library / path).read_bytes().decode("utf-8")) for path in found]


def write_held_out(out: Path, library: Path | None = None) -> list[Path]:
    """Copy the held-out files to the folder ``out``, replacing those of an earlier call; returns the copies.

    Raises:
        DataError: as `held_out_files`.
        OutputError: ``out`` is a file, or holds files that are not on the list.
    """
    files = held_out_files(library)
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; give a folder")
    present = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    if foreign := sorted(present - set(listed_paths())):
        raise OutputError(f"{out} holds other files ({', '.join(foreign[:3])}); give a new or an empty folder")
    shutil.rmtree(out, ignore_errors=True)
    for file in files:
        target = out / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.text.encode("utf-8"))
    return [out / file.path for file in files]


app = typer.Typer(add_completion=False)


@app.command()
def main(out: Annotated[Path, typer.Argument(help="Folder to write; files of an earlier call are replaced.")]) -> None:
    """Copy the demo models' held-out files from this Python's standard library to a folder."""
    written = write_held_out(out)
    print(f"{len(written)} of {len(listed_paths())} held-out files are in {out}")


if __name__ == "__main__":
    run_app(app)
