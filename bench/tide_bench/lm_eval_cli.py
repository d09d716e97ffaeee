"""``tide-lm-eval``: lm-eval's own command line, with the model ``tide`` registered.

lm-eval 0.4.13 finds models in a table of its own and asks no other package for more, so ``lm_eval --model tide`` finds none.
"""

from __future__ import annotations

from tide_runtime.cli.errors import run_app


def main() -> None:
    """Entry point of ``tide-lm-eval``; the options are lm-eval's."""
    run_app(_evaluate, command="tide-lm-eval", extra="eval")


def _evaluate() -> None:
    from lm_eval.__main__ import cli_evaluate

    import tide_bench.lm_eval_model  # noqa: F401  # registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
