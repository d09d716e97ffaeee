"""Inference of TensorRT types in a few Python files, through attributes, calls and assignments, without a manual list.

Every function is analysed repeatedly until a fixed point. Order within a function does not matter, nor from where it is
called: a parameter may be what any of its callers gives.
"""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

from api.facts import Class, Facts, Instance, Items, Module, Object, Scope, elements
from api.signatures import signatures, types_named


class Inference:
    """Facts about ``files`` with TensorRT's module ``trt``; ``attributes`` and ``calls``: all uses found, with their facts."""

    def __init__(self, trt: Any, files: list[Path]) -> None:
        self.trt = trt
        self.attributes: dict[tuple[Path, ast.Attribute], Facts] = defaultdict(set)
        self.calls: dict[tuple[Path, ast.Call], tuple[Facts, list[Facts], dict[str, Facts]]] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.files: dict[str, Scope] = {}
        for file in files:
            self.files[file.stem] = self._scope(ast.parse(file.read_text(encoding="utf-8")), file, None)
        self._known = -1
        while self._known != (known := self._count()):
            self._known = known
            for scope in list(self.scopes.values()):
                self._read(scope)

    def _count(self) -> int:
        return sum(len(facts) for s in self.scopes.values() for facts in (*s.names.values(), s.returns, s.bases))

    def _scope(self, node: ast.AST, file: Path, parent: Scope | None) -> Scope:
        if node not in self.scopes:
            self.scopes[node] = Scope(node, file, parent)
        return self.scopes[node]

    def _read(self, scope: Scope) -> None:
        if isinstance(scope.node, ast.Lambda):
            scope.returns |= self.facts(scope.node.body, scope)
        if not isinstance(getattr(scope.node, "body", None), list):  # comprehensions are analysed in place
            return
        if scope.parent is not None and scope.parent.is_class and isinstance(scope.node, ast.FunctionDef):
            self._own_class(scope, scope.parent)
        for base in getattr(scope.node, "bases", []):
            scope.bases |= self.facts(base, scope.parent or scope)
        for statement in scope.node.body:
            self._statement(statement, scope)

    @staticmethod
    def _own_class(method: Scope, owner: Scope) -> None:
        """The first parameter of a method, ``self`` or ``cls``."""
        if "staticmethod" not in method.decorators and method.node.args.args:
            own = owner if "classmethod" in method.decorators else Object(owner)
            method.names[method.node.args.args[0].arg].add(own)

    # Statements

    def _statement(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope.names[node.name].add(self._scope(node, scope.file, scope))
            return
        if isinstance(node, ast.ImportFrom):
            self._import(node, scope)
        elif isinstance(node, ast.Return) and node.value is not None:
            scope.returns |= self.facts(node.value, scope)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value, scope)
        elif isinstance(node, ast.For):
            self._iterate(node.target, node.iter, scope)
        elif isinstance(node, ast.If) and not self._may_hold(node.test, scope):
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.facts(child, scope)
            elif isinstance(child, ast.withitem) and child.optional_vars is not None:
                self._bind(child.optional_vars, self.facts(child.context_expr, scope), scope)
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.withitem | ast.match_case):
                self._statement(child, scope)

    def _import(self, node: ast.ImportFrom, scope: Scope) -> None:
        source = self.files.get((node.module or "").split(".")[-1])
        for alias in node.names if source is not None else []:
            assert source is not None
            scope.names[alias.asname or alias.name] |= source.names.get(alias.name, set())

    def _may_hold(self, test: ast.expr, scope: Scope) -> bool:
        """False for `if hasattr(x, "name")` where x has no such attribute: the branch is for other releases."""
        if not isinstance(test, ast.Call) or ast.unparse(test.func) != "hasattr":
            return True
        known, name = self.facts(test.args[0], scope), ast.literal_eval(test.args[1])
        return any(hasattr(self.trt if isinstance(fact, Module) else fact.type, name) for fact in known)

    def _assign(self, target: ast.AST, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, scope)
        else:
            self._bind(target, self.facts(value, scope), scope)

    def _bind(self, target: ast.AST, facts: Facts, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] |= facts
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._bind(element, elements(facts), scope)
        elif isinstance(target, ast.Subscript):
            self._bind(target.value, {Items(frozenset(facts))}, scope)
        elif isinstance(target, ast.Attribute) and target.attr == "__class__":
            made = {Instance(fact.type) for fact in facts if isinstance(fact, Class)}
            for fact in self.facts(target.value, scope):
                if isinstance(fact, Instance):
                    self._refine(fact, made, scope)
        elif isinstance(target, ast.Attribute):
            for fact in self.facts(target.value, scope):
                if isinstance(fact, Object):
                    fact.scope.names[target.attr] |= facts

    def _refine(self, old: Instance, made: Facts, scope: Scope) -> None:
        """Replace the bindings' generic ILayer by its class wherever it occurs in ``scope``."""
        for facts in scope.names.values():
            if old in facts:
                facts |= made
            for items in [fact for fact in facts if isinstance(fact, Items) and old in fact.facts]:
                facts.add(Items(items.facts | made))

    def _iterate(self, target: ast.AST, source: ast.expr, scope: Scope) -> None:
        self._bind(target, elements(self.facts(source, scope)), scope)

    # Expressions

    def facts(self, node: ast.expr | None, scope: Scope) -> Facts:
        if node is None:
            return set()
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is not None:
            return method(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.facts(child, scope)
        return set()

    def _Name(self, node: ast.Name, scope: Scope) -> Facts:
        return set(scope.look_up(node.id))

    def _Constant(self, node: ast.Constant, scope: Scope) -> Facts:
        return {Instance(type(node.value))} if isinstance(node.value, str | int | bool | float) else set()

    def _JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> Facts:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.facts(part.value, scope)
        return {Instance(str)}

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Facts:
        self.facts(node.test, scope)
        return self.facts(node.body, scope) | self.facts(node.orelse, scope)

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Facts:
        return set().union(*(self.facts(value, scope) for value in node.values))

    def _NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Facts:
        facts = self.facts(node.value, scope)
        self._bind(node.target, facts, scope)
        return facts

    def _Starred(self, node: ast.Starred, scope: Scope) -> Facts:
        self.facts(node.value, scope)
        return set()

    def _Tuple(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Facts:
        return {Items(frozenset().union(*(self.facts(element, scope) for element in node.elts)))}

    _List = _Set = _Tuple

    def _Dict(self, node: ast.Dict, scope: Scope) -> Facts:
        for key in node.keys:
            self.facts(key, scope)
        return {Items(frozenset().union(*(self.facts(value, scope) for value in node.values)))}

    def _ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Facts:
        inner = self._generators(node, scope)
        return {Items(frozenset(self.facts(node.elt, inner)))}

    _SetComp = _GeneratorExp = _ListComp

    def _DictComp(self, node: ast.DictComp, scope: Scope) -> Facts:
        inner = self._generators(node, scope)
        self.facts(node.key, inner)
        return {Items(frozenset(self.facts(node.value, inner)))}

    def _generators(self, node: Any, scope: Scope) -> Scope:
        """The scope of a comprehension's own names."""
        inner = self._scope(node, scope.file, scope)
        for generator in node.generators:
            self._iterate(generator.target, generator.iter, inner)
            for test in generator.ifs:
                self.facts(test, inner)
        return inner

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Facts:
        self.facts(node.slice, scope)
        return elements(self.facts(node.value, scope))

    def _Lambda(self, node: ast.Lambda, scope: Scope) -> Facts:
        return {self._scope(node, scope.file, scope)}

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Facts:
        receivers = self.facts(node.value, scope)
        self.attributes[scope.file, node] |= receivers
        return set().union(*(self._member(fact, node.attr) for fact in receivers))

    def _member(self, fact: Any, name: str) -> Facts:
        if isinstance(fact, Module):
            value = getattr(self.trt, name, None)
            return {Class(value) if isinstance(value, type) else Instance(type(value))} if value is not None else set()
        if isinstance(fact, Class) and not fact.method:
            value = getattr(fact.type, name, None)
            return {Class(fact.type, name)} if callable(value) else {Instance(type(value))} if value is not None else set()
        if isinstance(fact, Instance):
            return self._of_instance(fact.type, name)
        if isinstance(fact, Object):
            return self._of_object(fact, name)
        if isinstance(fact, Scope) and fact.is_class:
            return set(fact.names.get(name, set()))
        if isinstance(fact, Items) and name in ("values", "get", "pop", "copy", "items"):
            return {fact}
        return set()

    def _of_instance(self, owner: type, name: str) -> Facts:
        value = getattr(owner, name, None)
        if isinstance(value, property):
            return self._documented(value.fget)
        return {Class(owner, name)} if callable(value) else set()

    def _of_object(self, fact: Object, name: str) -> Facts:
        found: Facts = set()
        for member in fact.scope.names.get(name, set()):
            if isinstance(member, Scope) and not member.is_class:
                self._pass([{fact}], {}, member, skip=0)
                found |= member.returns if {"property", "cached_property"} & member.decorators else {member}
            else:
                found.add(member)
        for base in fact.scope.bases:
            inherited = Object(base) if isinstance(base, Scope) else Instance(base.type) if isinstance(base, Class) else None
            found |= self._member(inherited, name) if inherited is not None else set()
        return found

    def _documented(self, function: Any) -> Facts:
        facts: Facts = set()
        for signature in signatures(function):
            classes, many = types_named(self.trt, signature.returns)
            instances = frozenset(Instance(one) for one in classes)
            facts |= {Items(instances)} if many and instances else instances
        return facts

    def _Call(self, node: ast.Call, scope: Scope) -> Facts:
        callees = self.facts(node.func, scope)
        positional = [self.facts(argument, scope) for argument in node.args]
        named = {keyword.arg: self.facts(keyword.value, scope) for keyword in node.keywords if keyword.arg}
        self.calls[scope.file, node] = (callees, positional, named)
        spread = any(isinstance(argument, ast.Starred) for argument in node.args)
        found = self._builtin(node, positional)
        for fact in callees:
            if isinstance(fact, Class):
                found |= self._documented(getattr(fact.type, fact.method)) if fact.method else {Instance(fact.type)}
            elif isinstance(fact, Scope):
                found |= self._called(fact, [] if spread else positional, named)
            elif isinstance(fact, Items):
                found |= elements({fact}).union(*positional[1:2]) if ast.unparse(node.func).endswith((".get", ".pop")) else {fact}
        return found

    def _called(self, scope: Scope, positional: list[Facts], named: dict[str, Facts]) -> Facts:
        if not scope.is_class:
            inside = scope.parent is not None and scope.parent.is_class and "staticmethod" not in scope.decorators
            self._pass(positional, named, scope, skip=int(inside))
            return scope.returns
        makers = [member for member in scope.names.get("__init__", set()) if isinstance(member, Scope)]
        for maker in makers:
            self._pass([{Object(scope)}, *positional], named, maker, skip=0)
        if not makers:
            fields = [s.target.id for s in scope.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            for name, facts in [*zip(fields, positional, strict=False), *named.items()]:
                scope.names[name] |= facts
        return {Object(scope)}

    def _pass(self, positional: list[Facts], named: dict[str, Facts], scope: Scope, skip: int) -> None:
        arguments = scope.node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][skip:]
        for name, facts in [*zip(names, positional, strict=False), *named.items()]:
            scope.names[name] |= facts
        every = [*arguments.posonlyargs, *arguments.args]
        for argument, default in zip(every[len(every) - len(arguments.defaults) :], arguments.defaults, strict=True):
            scope.names[argument.arg] |= self.facts(default, scope.parent or scope)

    def _builtin(self, node: ast.Call, positional: list[Facts]) -> Facts:
        name = ast.unparse(node.func)
        if name in ("import_module", "importlib.import_module"):
            return set() if "plugin" in ast.unparse(node.args[0]) else {Module()}
        if name in ("list", "tuple", "sorted", "reversed", "set", "iter"):
            return positional[0] if positional else set()
        if name in ("enumerate", "zip", "next"):
            inside = set().union(*(elements(facts) for facts in positional))
            return inside if name == "next" else {Items(frozenset(inside))}
        if name == "getattr" and len(positional) > 1:  # an enumeration's member by a computed name
            return {Instance(fact.type) for fact in positional[0] if isinstance(fact, Class)}
        return {Instance(int)} if name in ("int", "len") else set()
