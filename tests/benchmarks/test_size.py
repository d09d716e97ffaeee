"""What `benchmarks.size` counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks import size


def test_lines_are_those_of_the_files() -> None:
    """The figure that the project is held to would leave out new files, or count tests."""
    lines = size.file_lines(None)
    this = Path(size.__file__)
    assert lines["benchmarks/size.py"] == len(this.read_text(encoding="utf-8").splitlines())
    assert not any(path.startswith("tests/") for path in lines)


def test_packages_and_small_files() -> None:
    """The runtime and the server would be one row, or CUDA headers count as files that are too small."""
    lines = {"runtime/tide_serve/a.py": 60, "runtime/tide_runtime/b.py": 59, "plugins/c.cuh": 5, "tide_export/d/e.py": 1}
    assert size.by_package(lines) == {"runtime/tide_serve": 60, "runtime/tide_runtime": 59, "plugins": 5, "tide_export": 1}
    assert size.small_files(lines) == 2
