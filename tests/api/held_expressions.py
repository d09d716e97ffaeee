"""Check uses of TensorRT in files against its real classes, in a process of its own that can import the bindings; prints JSON.

python held_expressions.py MODULE FOLDER STUB,STUB…      FOLDER: where the package lies, '' for where Python finds it

Reads JSON from stdin: path of a file → function, '' for all of the file → expression in its source → class of the expression's
value, or 'module'. Every attribute of such an expression must exist, every one that is assigned must be settable, and every call
must fit a signature in the docstring that pybind11 generates.
"""

import ast
import ctypes
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mypy.stubdoc import FunctionSig, infer_sig_from_docstring

Table = dict[str, dict[str, str]]


class HeldFile:
    """``used``: the expressions whose attributes occur; ``problems``: 'file:line: what is wrong'."""

    def __init__(self, trt: Any, path: Path, table: Table) -> None:
        self.trt, self.path, self.table = trt, path, table
        self.used: set[str] = set()
        self.problems: list[str] = []
        for node, function in self._nodes(ast.parse(path.read_text(encoding="utf-8")), ""):
            if isinstance(node, ast.Attribute):
                self._attribute(node, function)
            elif isinstance(node, ast.Call):
                self._call(node, function)
            elif isinstance(node, ast.ClassDef):
                self._overrides(node, function)

    def _nodes(self, node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
        """All nodes below ``node``, each with the innermost function around it, but for branches that are for other releases."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and self._is_of_another_release(child.test, function):
                continue
            yield child, function
            yield from self._nodes(child, child.name if isinstance(child, ast.FunctionDef) else function)

    def _is_of_another_release(self, test: ast.expr, function: str) -> bool:
        """Whether it is `hasattr(x, "name")`, and x has no such attribute."""
        if not isinstance(test, ast.Call) or ast.unparse(test.func) != "hasattr":
            return False
        owner = self._value(test.args[0], function)
        return owner is not None and not hasattr(owner, ast.literal_eval(test.args[1]))

    def _value(self, node: ast.expr, function: str) -> Any:
        """The module, or the class of an expression's value; a class stands for itself as well. None: unknown."""
        text = ast.unparse(node)
        named = self.table.get(function, {}).get(text) or self.table.get("", {}).get(text)
        if named is not None:
            self.used.add(text)
            return self.trt if named == "module" else getattr(self.trt, named)
        if isinstance(node, ast.Attribute) and self._value(node.value, function) is self.trt:
            found = getattr(self.trt, node.attr, None)
            return found if isinstance(found, type) else None
        return None

    def _attribute(self, node: ast.Attribute, function: str) -> None:
        owner = self._value(node.value, function)
        if owner is None or node.attr.startswith("__"):
            return
        if not hasattr(owner, node.attr):
            self._wrong(node, f"{owner.__name__} has no {node.attr}")
            return
        value = getattr(owner, node.attr)
        if isinstance(node.ctx, ast.Store) and isinstance(value, property) and value.fset is None:
            self._wrong(node, f"{node.attr} of {owner.__name__} cannot be set")

    def _call(self, node: ast.Call, function: str) -> None:
        spread = any(isinstance(argument, ast.Starred) for argument in node.args)
        if not isinstance(node.func, ast.Attribute) or spread:
            return
        owner = self._value(node.func.value, function)
        callee = getattr(owner, node.func.attr, None)
        if owner is None or callee is None:
            return
        if isinstance(callee, type):
            title, signatures = callee.__name__, _signatures(callee.__init__)  # type: ignore[misc]
        else:
            title, signatures = f"{owner.__name__}.{node.func.attr}", _signatures(callee)
        reasons = [self._mismatch(signature, node, function) for signature in signatures]
        if reasons and all(reasons):
            self._wrong(node, f"{title} {reasons[0]}")

    def _mismatch(self, signature: FunctionSig, node: ast.Call, function: str) -> str:
        """Why a call does not fit ``signature``; empty if it does."""
        parameters = {parameter.name: parameter for parameter in signature.args if parameter.name != "self"}
        positional = node.args[isinstance(node.func, ast.Attribute) and node.func.attr == "__init__" :]
        given = dict(zip(parameters, positional, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg is not None}
        if any(name.startswith("*") for name in parameters):
            return ""
        if len(positional) > len(parameters):
            return f"takes {len(parameters)} arguments, {len(positional)} given"
        if unknown := sorted(set(given) - set(parameters)):
            return f"has no argument {unknown[0]}"
        if missing := [name for name, parameter in parameters.items() if not parameter.default and name not in given]:
            return f"lacks the argument {missing[0]}"
        for name, argument in given.items():
            known = self._value(argument.value if isinstance(argument, ast.Attribute) else argument, function)
            wanted = getattr(self.trt, str(parameters[name].type).rpartition(".")[2], None)
            if isinstance(known, type) and isinstance(wanted, type) and not issubclass(known, wanted):
                return f"wants {wanted.__name__} as {name}"
        return ""

    def _overrides(self, node: ast.ClassDef, function: str) -> None:
        """Methods that TensorRT calls have the same number of parameters as those that they override."""
        for base in filter(None, (self._value(base, function) for base in node.bases)):
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                    continue
                title, count = f"{base.__name__}.{method.name}", len(method.args.args)
                counts = [len(signature.args) for signature in _signatures(getattr(base, method.name, None))]
                if not hasattr(base, method.name):
                    self._wrong(method, f"{title} overrides nothing")
                elif counts and count not in counts:
                    self._wrong(method, f"{title} is called with {counts[0] - 1} arguments, takes {count - 1}")

    def _wrong(self, node: Any, problem: str) -> None:
        self.problems.append(f"{self.path.name}:{node.lineno}: {problem}")


def _signatures(function: Any) -> list[FunctionSig]:
    return infer_sig_from_docstring(function.__doc__, function.__name__) or [] if function is not None else []


def main() -> None:
    module, folder, stubs = sys.argv[1:]
    for stub in filter(None, stubs.split(",")):
        ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    if folder:
        sys.path.insert(0, folder)
    trt = importlib.import_module(module)
    problems = []
    for path, table in json.load(sys.stdin).items():
        file = HeldFile(trt, Path(path), table)
        unused = sorted({text for held in table.values() for text in held} - file.used)
        problems += [*file.problems, *(f"{file.path.name}: nothing is used of {text}" for text in unused)]
    print(json.dumps({"version": trt.__version__, "problems": sorted(set(problems))}))


main()
