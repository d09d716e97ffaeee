"""``tide-lm-eval``: lm-eval's own command line, with the model ``tide`` registered.

lm-eval 0.4.13 finds models in a table of its own and asks no other package for more, so ``lm_eval --model tide`` finds none.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tide_runtime.cli.errors import run_app


def main() -> None:
    """Entry point of ``tide-lm-eval``; the options are lm-eval's."""
    if find_spec("lm_eval") is None:
        sys.exit("error: lm-eval is not installed; pip install 'tide-llm[eval]'")
    from lm_eval.__main__ import cli_evaluate

    import tide_bench.lm_eval_model  # noqa: F401  # registers the model

    run_app(cli_evaluate)


if __name__ == "__main__":
    main()
