"""The code stays within the budget of pyproject.toml."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
ADVICE = "take it from elsewhere in it, or raise [tool.tide.budget] of pyproject.toml and say in the commit what users get for it"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZE = load(ROOT / ".ci" / "size.py")
BUDGET = SIZE.budget()


@pytest.mark.parametrize("package", BUDGET["tokens"])
def test_a_package_is_within_its_budget(package: str) -> None:
    """Code would grow without anybody having decided so, as it did by a third in three days."""
    found, allowed = SIZE.tokens(package)[0], BUDGET["tokens"][package]
    assert 0 < found <= allowed, f"{package} has {found} tokens, {allowed} are allowed: {ADVICE}"


def test_tests_are_within_their_budget() -> None:
    """Tests would take as long to read and to run as the code that they guard."""
    found, allowed = SIZE.lines("tests"), BUDGET["test_lines"]
    assert 0 < found <= allowed, f"tests have {found} lines, {allowed} are allowed: {ADVICE}"
