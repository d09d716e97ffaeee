"""The import contracts see all of the code."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without ``__init__.py`` is not in the import graph: `make lint` would accept any import in it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["importlinter"]["root_packages"]
    parents = [ROOT / parent for parent in (".", *settings["tool"]["hatch"]["build"]["dev-mode-dirs"])]
    roots = [folder / name for name in packages for folder in parents if (folder / name).is_dir()]
    assert {root.name for root in roots} == set(packages)
    folders = {file.parent for root in roots for file in root.rglob("*.py")}
    assert not sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file())
