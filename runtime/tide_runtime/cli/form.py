"""What all commands share beside their errors: ``-h``, ``--version``, their help where they are called without arguments, and
options that are made from the fields of dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand


class _Usage(TyperCommand):
    """Names arguments in capitals, as manuals do; typer writes ``{model}``."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [piece.strip("{}").upper() for piece in super().collect_usage_pieces(ctx)]


# Keywords of `typer.Typer` and of its decorator `command`. A command that runs without arguments sets no_args_is_help to False.
APP: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "markdown"}
COMMAND: dict[str, Any] = {
    "cls": _Usage,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "no_args_is_help": True,
    "epilog": "`--version` alone prints the version.",
}
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(**before: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates the function of a command: a parameter whose type is a dataclass becomes the options of its fields
    (`tide_runtime.option`), and the function is called with the dataclass that is made from their values.

    Args:
        before: name of a parameter or field → the one that it stands before in the help, where that is not its own place.
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        parameters: dict[str, inspect.Parameter] = {}
        dataclasses: dict[str, Any] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            if is_dataclass(kind := parameter.annotation):
                dataclasses[name] = kind
                parameters |= _options(kind)
            else:
                parameters[name] = parameter.replace(kind=_KEYWORD)
        order = list(parameters)
        for name, place in before.items():
            order.remove(name)
            order.insert(order.index(place), name)

        @wraps(function)
        def command(**values: Any) -> None:
            for name, kind in dataclasses.items():
                values[name] = kind(**{option: _hashable(values.pop(option)) for option in _options(kind)})
            function(**values)

        command.__signature__ = inspect.Signature([parameters[name] for name in order])  # type: ignore[attr-defined]
        return command

    return decorated


def _options(kind: Any) -> dict[str, inspect.Parameter]:
    """Those of a dataclass's fields that `option` made."""
    hints = get_type_hints(kind)
    options = {}
    for one in fields(kind):
        if one.metadata:
            form = dict(one.metadata["form"])
            default = form.pop("command_default", one.default)
            hint: Any = form.pop("kind", hints[one.name])
            annotation = Annotated[hint, typer.Option(*one.metadata["names"], **form)]
            options[one.name] = inspect.Parameter(one.name, _KEYWORD, default=default, annotation=annotation)
    return options


def _hashable(value: Any) -> Any:
    """An option that is repeatable gives a list."""
    return tuple(value) if isinstance(value, list) else value
