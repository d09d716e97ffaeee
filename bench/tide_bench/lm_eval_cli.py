"""``tide-lm-eval``: lm-eval's own command line, with the model ``tide`` registered.

lm-eval 0.4.13 finds models in a table of its own and asks no other package for more, so ``lm_eval --model tide`` finds none.
"""

from __future__ import annotations

from typing import Annotated

import typer
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND

app = typer.Typer(**APP)
_ANY = {"allow_interspersed_args": False, "ignore_unknown_options": True}


@app.command(**COMMAND | {"context_settings": COMMAND["context_settings"] | _ANY})
def evaluate(
    arguments: Annotated[list[str], typer.Argument(help="As `lm_eval` takes them.")],
) -> None:
    """Run lm-evaluation-harness with TIDE as the model `tide`. `tide-lm-eval run --help` lists its options.

    Example: `tide-lm-eval --model tide --model_args bundle=engine/ --tasks hellaswag --batch_size 8`
    """
    from lm_eval.__main__ import cli_evaluate

    import tide_bench.lm_eval_model  # noqa: F401  # registers the model

    cli_evaluate()  # reads the process's arguments


def main() -> None:
    """Entry point of ``tide-lm-eval``."""
    run_app(app, command="tide-lm-eval", extra="eval")


if __name__ == "__main__":
    main()
