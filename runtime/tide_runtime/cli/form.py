"""What all commands share beside their errors: ``-h``, ``--version``, and their help where they are called without arguments."""

from __future__ import annotations

from typing import Any

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
