"""Conformance cases of the kernels, run on the host by tests and on a GPU by `make gpu-check`. Needs ml_dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from tide_plugins.conformance.case import Case, CaseSpec
from tide_plugins.conformance.exact_cases import exact_cases
from tide_plugins.conformance.loop_cases import loop_cases
from tide_plugins.conformance.router_cases import router_cases

__all__ = ["Case", "CaseSpec", "cases"]


def cases() -> Iterator[CaseSpec]:
    """All cases. `CaseSpec.build` generates the inputs, seeded by the case's name."""
    yield from router_cases()
    yield from loop_cases()
    yield from exact_cases()
