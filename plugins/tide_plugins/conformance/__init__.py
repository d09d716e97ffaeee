"""Conformance cases of the kernels, run on the host by tests and on a GPU by `make gpu-check`. Needs ml_dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from tide_plugins.conformance.case import Case, CaseSpec
from tide_plugins.conformance.loop_cases import loop_cases
from tide_plugins.conformance.router_cases import router_cases
from tide_plugins.conformance.select_cases import select_cases
from tide_plugins.conformance.translate_cases import translate_cases
from tide_plugins.conformance.verify_cases import verify_cases

__all__ = ["Case", "CaseSpec", "cases"]


def cases() -> Iterator[CaseSpec]:
    """All cases. `CaseSpec.build` generates the inputs, seeded by the case's name."""
    yield from router_cases()
    yield from select_cases()
    yield from translate_cases()
    yield from verify_cases()
    yield from loop_cases()
