"""Lines of code for GPUs that nothing reaches: no command of the package, no plugin of its runtime, and no stage of the GPU kit.

    python -m benchmarks.gpu_reach [--at REVISION]

The walk starts at the commands and entry points of pyproject.toml, at `python -m tide_plugins`, and at the modules of
``benchmarks.gpu`` that the Makefile or a page names. It follows names: a function reaches what it names, by its imports; a
string reaches the module or the kernel that it names. A method counts as reached when its class is and something reached
names an attribute like it, or another library's class declares it, so the figure is a lower bound. CUDA sources are reached from
the launch that names their kernel, and headers by ``#include``; other C++ is reached by nothing. Conformance cases and references
may be reached by the kit alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = ("", "runtime", "calibrate", "plugins", "bench")
PACKAGES = ("tide_export", "tide_runtime", "tide_serve", "tide_calibrate", "tide_plugins", "tide_bench", "benchmarks")
FOR_GPUS = re.compile(
    r"plugins/|benchmarks/gpu/|tide_export/targets/|runtime/tide_runtime/(device_loop|backends/(device|tensorrt|torch|onnxruntime/cuda))"
)
_KERNELS = "plugins/tide_plugins/csrc/"
_REGISTRY = "tide_plugins.kernels"  # which names every kernel
_ONLY_CHECKS = re.compile(r"plugins/tide_plugins/(conformance|reference)/|benchmarks/gpu/")
_ENTRY = re.compile(r"tide_(\w+)_##suffix")
Name = tuple[
    str, str
]  # module, and a definition in it: a function, a class, Class.method, a variable; "" for what an import runs


@dataclass
class Definition:
    """``uses``: names that it mentions, dotted where they are attributes. ``lines``: of its text, none for assignments.

    ``bases``: a class's, by the names in its file.
    """

    uses: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    lines: range = range(0)
    bases: tuple[str, ...] = ()


class Module:
    """A file's definitions and imports."""

    def __init__(self, path: Path) -> None:
        self.path, text = path, path.read_text(encoding="utf-8")
        self.lines = len(text.splitlines())
        self.imports: dict[str, Name] = {}
        self.definitions: dict[str, Definition] = {"": Definition()}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        for node in tree.body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.definitions[node.name] = _definition(node)
            if any("." in ast.unparse(decorator) for decorator in node.decorator_list):  # a registry's, such as @app.command()
                self.definitions[""].uses.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            rest = ast.ClassDef(
                node.name, node.bases, node.keywords, [c for c in node.body if c not in methods], node.decorator_list
            )
            self.definitions[node.name] = _definition(node, rest)
            self.definitions[node.name].bases = tuple(ast.unparse(base).partition("[")[0] for base in node.bases)
            self.definitions |= {f"{node.name}.{method.name}": _definition(method) for method in methods}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (name for whole in targets for name in ast.walk(whole) if isinstance(name, ast.Name)):
                self.definitions[target.id] = Definition(*_mentioned(node))
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            uses, strings = _mentioned(node)
            self.definitions[""].uses |= uses
            self.definitions[""].strings |= strings


def _definition(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, read: ast.AST | None = None) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Definition(*_mentioned(read or node), range(first, (node.end_lineno or first) + 1))


def _mentioned(node: ast.AST) -> tuple[set[str], set[str]]:
    uses, strings = set[str](), set[str]()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            uses.add(part.id)
        elif isinstance(part, ast.Attribute):
            uses.add(f"{part.value.id}.{part.attr}" if isinstance(part.value, ast.Name) else f".{part.attr}")
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            strings.add(part.value)
    return uses, strings


class Reach:
    """What ``roots`` reach in the tree at ``root``."""

    def __init__(self, root: Path, modules: Mapping[str, Module], roots: Iterable[Name]) -> None:
        self.root, self.modules, self.reached, self._open = root, modules, set[Name](), list[Name]()
        self.strings, self._attributes = set[str](), set[str]()
        self._methods: list[Name] = []  # of reached classes, and of modules used as values; not reached yet
        for name in roots:
            self._reach(*name)
        while self._open or self._open_methods():
            while self._open:
                self._follow(*self._open.pop())

    def _reach(self, module: str, name: str) -> None:
        """Reach a definition, or what an import of it binds: a definition of another module, or a module."""
        seen = set[Name]()
        while (found := self.modules.get(module)) is not None and (module, name) not in seen:
            seen.add((module, name))
            if name in found.definitions:
                self._mark(module, name)
                return
            if name not in found.imports:
                module, name = f"{module}.{name}", ""  # a module of a package
                continue
            module, name = found.imports[name]

    def _mark(self, module: str, name: str) -> None:
        parts = module.split(".")
        for one in (*((".".join(parts[:count]), "") for count in range(1, len(parts) + 1)), (module, name)):
            if one not in self.reached and one[0] in self.modules:
                self.reached.add(one)
                self._open.append(one)

    def _follow(self, module: str, name: str) -> None:
        here = self.modules[module]
        if not name:
            for imported in {source for source, _ in here.imports.values()} & self.modules.keys():
                self._mark(imported, "")
        definition = here.definitions[name]
        self.strings |= definition.strings if module != _REGISTRY else set()
        short = ("benchmarks.gpu", "benchmarks.gpu.", "benchmarks.gpu.kit.stages.") if module.startswith("benchmarks.") else ()
        for text in definition.strings:
            for path in (text, *(prefix + text for prefix in short)):
                if path in self.modules:
                    self._all_of(path)
        methods = [(module, method) for method in here.definitions if method.startswith(f"{name}.") and name]
        self._methods += methods
        if any(self._is_foreign(here, base) for base in definition.bases):  # another library calls what it declares
            self._attributes |= {method.split(".")[1] for _, method in methods}
        for use in definition.uses:
            self._attributes.add(use.rsplit(".", 1)[-1])
            first, _, rest = use.partition(".")
            if first in here.definitions:
                self._mark(module, first)
            elif first in here.imports:
                source, imported = here.imports[first]
                self._reach(source, imported)
                whole = f"{source}.{imported}" if imported else source
                if rest and whole in self.modules:
                    self._reach(whole, rest.split(".")[0])
                elif whole in self.modules:  # a module as a value, which is used by attributes like an object
                    self._methods += [(whole, name) for name in self.modules[whole].definitions if "." not in name]

    def _is_foreign(self, here: Module, base: str) -> bool:
        first = base.partition(".")[0]
        return first not in here.definitions and here.imports.get(first, (first, ""))[0].partition(".")[0] not in PACKAGES

    def _all_of(self, module: str) -> None:
        for name in self.modules[module].definitions:
            if "." not in name:
                self._mark(module, name)

    def _open_methods(self) -> bool:
        named = [one for one in self._methods if (last := one[1].split(".")[-1]) in self._attributes or last.startswith("__")]
        self._methods = [one for one in self._methods if one not in named]
        for one in named:
            self._mark(*one)
        return bool(named)

    def lines(self, module: str) -> int:
        """Reached lines of a module: all, without the text of definitions that nothing reaches."""
        if (module, "") not in self.reached:
            return 0
        found, missed = self.modules[module], set[int]()
        for name, definition in found.definitions.items():
            if (module, name) not in self.reached and ("." not in name or (module, name.split(".")[0]) in self.reached):
                missed |= {*definition.lines}
        return found.lines - len(missed)

    def sources(self) -> set[str]:
        """CUDA files of the kernels whose names are reached, and the headers that they include."""
        folder, found = self.root / _KERNELS, set[str]()
        waiting = [
            path.name for path in folder.glob("*.cuh") if self.strings & {path.stem, *_ENTRY.findall(path.read_text("utf-8"))}
        ]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += re.findall(r'#include "([^"]+)"', (folder / name).read_text(encoding="utf-8"))
        return found


def _modules(root: Path) -> dict[str, Module]:
    found = {}
    for folder in (root / name for name in PACKAGE_FOLDERS):
        for package in PACKAGES:
            for path in sorted((folder / package).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Module(path)
    return found


def product(root: Path) -> list[Name]:
    """Commands, and what the packages look up by entry points."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    values = [*project["scripts"].values(), *(name for group in project["entry-points"].values() for name in group.values())]
    return [*((module, name) for module, _, name in (value.partition(":") for value in values)), ("tide_plugins.__main__", "")]


def checks(root: Path) -> list[Name]:
    """The modules of benchmarks.gpu that documentation or Makefile name."""
    pages = [root / "Makefile", root / "README.md", root / "plugins" / "README.md", *(root / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = {f"benchmarks.gpu.{name}" for name in re.findall(r"-m benchmarks\.gpu\.(\w+)", text)}
    modules = {module.removesuffix(".__main__") for module in named | {f"{name}.__main__" for name in named}}
    return [(name, part) for name in modules for part in ("", "main")] + [(f"{name}.__main__", "") for name in modules]


@dataclass(frozen=True)
class FileReach:
    """``commands`` and ``checked``: lines that the product reaches, and that only its checks on a GPU reach."""

    path: str
    lines: int
    commands: int
    checked: int

    @property
    def unreached(self) -> int:
        return self.lines - self.commands - self.checked


def reach(root: Path) -> list[FileReach]:
    """Every file that serves GPUs."""
    modules = _modules(root)
    by_commands, by_all = Reach(root, modules, product(root)), Reach(root, modules, [*product(root), *checks(root)])
    rows, kernels = [], by_commands.sources()
    for name, module in modules.items():
        name_of_file = str(module.path.relative_to(root))
        if FOR_GPUS.match(name_of_file):
            commands = by_commands.lines(name)
            checked = by_all.lines(name) - commands if _ONLY_CHECKS.match(name_of_file) else 0
            rows.append(FileReach(name_of_file, module.lines, commands, checked))
    for file in sorted((root / "plugins").rglob("*")):
        within = file.relative_to(root)
        if file.suffix in (".cuh", ".h", ".cpp") and "test" not in within.parts:
            lines = len(file.read_text(encoding="utf-8").splitlines())
            reached = str(within.parent) == _KERNELS.rstrip("/") and file.name in kernels
            rows.append(FileReach(str(within), lines, lines if reached else 0, 0))
    return rows


def by_folder(rows: Iterable[FileReach]) -> list[FileReach]:
    """One row per folder, in order."""
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        found = sums.setdefault(str(Path(row.path).parent), Counter())
        found.update({"lines": row.lines, "commands": row.commands, "checked": row.checked})
    return [FileReach(folder, found["lines"], found["commands"], found["checked"]) for folder, found in sorted(sums.items())]


def reach_at(revision: str) -> list[FileReach]:
    """What reaches each file of a revision of git."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return reach(Path(folder))


def main(
    at: Annotated[str, typer.Option(help="A revision of git; without it, the files as they are now.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """List what nothing reaches."""
    rows = reach_at(at) if at else reach(ROOT)
    table = Table("folder", "lines", "reached by commands", "by checks only", "by nothing", title="Code that serves GPUs")
    for row in by_folder(rows):
        table.add_row(row.path, *(f"{number:,}" for number in (row.lines, row.commands, row.checked, row.unreached)))
    console = Console(width=120)
    console.print(table)
    for row in rows:
        if row.unreached:
            console.print(f"{row.path}: {row.unreached} of {row.lines} lines", highlight=False)
    report = Report("gpu_reach", at=at)
    report.rows = [asdict(row) | {"unreached": row.unreached} for row in rows]
    report.add("gpu_lines", sum(row.lines for row in rows))
    report.add("gpu_checked_lines", sum(row.checked for row in rows))
    report.add("gpu_unreached_lines", sum(row.unreached for row in rows))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
