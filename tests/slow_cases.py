"""Parametrisations of which `make test` runs a part."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """``cases`` as parameters, all of them marked slow but ``fast``. A tuple is a value for each of several arguments."""
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    return [pytest.param(*given, marks=[] if case in fast else pytest.mark.slow) for case, given in values.items()]
