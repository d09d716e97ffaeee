"""Fields of dataclasses that commands have as options; `tide_runtime.cli.form.with_options` makes the options from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from tide_runtime.errors import ParamsError


def option(default: Any, help: str, *names: str, one_of: Sequence[str] | None = None, **form: Any) -> Any:
    """A field of a dataclass that is an option of a command as well.

    Args:
        names: the option's; none: ``--field-name``, and ``--no-field-name`` too for True or False.
        one_of: the allowed values, which `check_choices` checks.
        form: keywords of `typer.Option`, and where the command line differs from the field: ``kind``, the type that it is read as
            (``list[str]`` for a tuple: repeatable), and ``command_default``.
    """
    return field(default=default, metadata={"names": names, "one_of": one_of, "form": {"help": help, **form}})


def check_choices(options: Any) -> None:
    """Raise ParamsError that names the first field of the dataclass ``options`` which is not ``one_of`` its allowed values."""
    for one in fields(options):
        allowed = one.metadata.get("one_of")
        value = getattr(options, one.name)
        if allowed and value not in allowed:
            raise ParamsError(f"{one.name} is {value!r}; set it to one of: {', '.join(allowed)}")
