"""How large the code is. CI prints it, so that growth is seen; tests/test_budget.py holds it against pyproject.toml.

Counted are tracked Python files: lines as they are; tokens and code lines without comments and docstrings.
"""

import ast
import subprocess
import tokenize
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None]
    return {line for node in nodes for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}


def tokens(folder: str) -> tuple[int, int]:
    """Tokens and code lines of the tracked Python files below ``folder``."""
    counted = [tokens_of(path) for path in tracked(folder)]
    return sum(count for count, _ in counted), sum(lines for _, lines in counted)


@cache
def tokens_of(path: Path) -> tuple[int, int]:
    docs = docstring_lines(ast.parse(path.read_bytes()))
    with path.open("rb") as file:
        read = [t for t in tokenize.tokenize(file.readline) if t.type not in LAYOUT and t.start[0] not in docs]
    return len(read), len({line for t in read for line in range(t.start[0], t.end[0] + 1)})


def lines(folder: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in tracked(folder))


def tracked(folder: str) -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", f"{folder}/**/*.py", f"{folder}/*.py"], cwd=ROOT, text=True).split()
    return [path for name in dict.fromkeys(listed) if (path := ROOT / name).exists()]


def budget() -> dict[str, Any]:
    """What pyproject.toml allows: ``test_lines``, and ``tokens`` by package."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tide"]["budget"]


def tuple_share(paths: list[Path]) -> float:
    """Percent of assignments that give several names their values at once."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Assign)]
    tuples = sum(isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple) for node in nodes)
    return 100 * tuples / len(nodes)


def main() -> None:
    outside = [path for path in tracked(".") if ROOT / "tests" not in path.parents]
    counted = [tokens_of(path) for path in outside]
    token_count = sum(count for count, _ in counted)
    print(f"RESULT tokens_outside_tests={token_count}")
    print(f"RESULT lines_outside_tests={lines('.') - lines('tests')}")
    print(f"RESULT tokens_per_code_line={token_count / sum(number for _, number in counted):.2f}")
    print(f"RESULT bench_lines={lines('bench')}")
    print(f"RESULT test_lines={lines('tests')}")
    print(f"RESULT tuple_assignments_pct={tuple_share(outside):.1f}")
    for package in budget()["tokens"]:
        print(f"RESULT tokens_{package.rpartition('/')[2]}={tokens(package)[0]}")


if __name__ == "__main__":
    main()
