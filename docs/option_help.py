"""A griffe extension: fields made by `option` have their default and their help on the page of the Python API."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

import griffe


class OptionHelp(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Adds what a parser of the source does not see, to the dataclasses of a module that imports `option`."""
        if cls.docstring is None or "dataclass" not in cls.labels or "option" not in cls.module.imports:
            return
        options = [one for one in fields(getattr(import_module(cls.module.path), cls.name)) if one.metadata]
        for one in options:
            cls.attributes[one.name].value = repr(one.default)
        text, _, described = cls.docstring.value.partition("Args:\n")
        added = [f"    {one.name}: {one.metadata['form']['help']}\n" for one in options if f"    {one.name}:" not in described]
        cls.docstring.value = f"{text.rstrip()}\n\nArgs:\n{''.join(added)}{described}"
