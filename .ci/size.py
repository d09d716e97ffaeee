"""How large the code is. CI prints it, so that growth is seen.

Counted are tracked Python files: lines as they are; tokens and code lines without comments and docstrings.
"""

import ast
import subprocess
import tokenize
from pathlib import Path

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


def main() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    files = {name: ROOT / name for name in listed if (ROOT / name).exists()}
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in files.items()}
    token_count = code_lines = 0
    assignments = list[ast.Assign]()
    for name in [name for name in files if not name.startswith("tests/")]:
        tree = ast.parse(files[name].read_bytes())
        docs = docstring_lines(tree)
        with files[name].open("rb") as file:
            tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in LAYOUT and t.start[0] not in docs]
        token_count += len(tokens)
        code_lines += len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)})
        assignments += [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    tuples = sum(isinstance(a.value, ast.Tuple) and isinstance(a.targets[0], ast.Tuple) for a in assignments)
    print(f"RESULT tokens_outside_tests={token_count}")
    print(f"RESULT lines_outside_tests={sum(n for name, n in lines.items() if not name.startswith('tests/'))}")
    print(f"RESULT tokens_per_code_line={token_count / code_lines:.2f}")
    print(f"RESULT bench_lines={sum(n for name, n in lines.items() if name.startswith('bench/'))}")
    print(f"RESULT test_lines={sum(n for name, n in lines.items() if name.startswith('tests/'))}")
    print(f"RESULT tuple_assignments_pct={100 * tuples / len(assignments):.1f}")


if __name__ == "__main__":
    main()
