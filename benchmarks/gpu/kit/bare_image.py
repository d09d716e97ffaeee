"""A rented GPU machine's Python: these packages, this repository beside them without an installation, and no registry.

A dry run hides what the image lacks, so that a missing package is found without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".", "runtime", "calibrate", "plugins", "bench")  # of this repository's packages

# The packages of the image on which the kit has to run, as its list of 2026-11-17 names them.
PACKAGES = frozenset(Path(__file__).with_name("image_packages.txt").read_text(encoding="utf-8").split())


def make_importable(work: Path) -> None:
    """Put this repository before everything else on ``sys.path``, here and in child processes.

    ``work``: a folder for the package's metadata, without which its entry points, the loop kernels among them, are not found.
    """
    places = [*(str(ROOT / folder) for folder in FOLDERS), str(_metadata(work))]
    sys.path[:] = [*places, *(place for place in sys.path if place not in places)]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *(place for place in before if place and place not in places)])


def _metadata(work: Path) -> Path:
    """A folder with what ``pip install`` would leave of pyproject.toml: name and entry points; nothing asks the version."""
    project = _project()
    folder = work / "metadata" / "tide_llm-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return folder.parent.resolve()


def hide_other_packages() -> None:
    """From here on, packages that this repository declares and the image lacks cannot be imported, however they are installed."""
    sys.path.append(str(ROOT / "tests"))  # for their simulated GPU
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
    declared = [*_project()["dependencies"], *(line for extra in _project()["optional-dependencies"].values() for line in extra)]
    absent = {_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in declared} - PACKAGES
    for module, owners in packages_distributions().items():
        if module not in sys.modules and not absent.isdisjoint(map(_plain, owners)):
            sys.modules[module] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _plain(name: str) -> str:
    """The package's name as `PACKAGES` spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()
