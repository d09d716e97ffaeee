"""Texts on processors that this machine is not: with newer instruction sets hidden, or under user-mode emulation."""

from pathlib import Path

import pytest
from runtime.other_processors import ARM, CPUS, FORMS, export_forms, on_processor, unavailable

from runtime import arm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Rows that launches and sequences are padded to: what invariance.py says of each instruction set, and what would pass unseen if
# this machine's own kernels ran.
ANY, TWO = "least=1, multiple=1, spare=0", "least=2, multiple=1, spare=0"
ONE_MORE = "least=1, multiple=1, spare=1"
PADDINGS = {
    "AVX2": {"fp32": (ANY, ONE_MORE), "int8": (ANY, ONE_MORE), "int4": (TWO, ONE_MORE)},
    "AVX": {"fp32": (ANY, ONE_MORE), "int8": (TWO, ONE_MORE), "int4": (TWO, ONE_MORE)},
    "SSE4": {form: (ANY, ONE_MORE) for form in FORMS},
    ARM: {form: (ANY, ONE_MORE) for form in FORMS},
}
PADDINGS = {kind: forms | {"w8a8": (ANY, ONE_MORE)} for kind, forms in PADDINGS.items()}  # integer products


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return export_forms(tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("kind", [*CPUS, ARM])
def test_texts_are_the_same_in_company_and_under_drafts(kind: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    """On most desktops a text would change when a second caller joins, and `exact` would change it or switch itself off."""
    if reason := arm_python.unavailable() if kind == ARM else unavailable():
        pytest.skip(reason)
    for texts in on_processor(kind, bundles, tmp_path):
        if texts.form in FORMS:
            launch, sequence = PADDINGS[kind][texts.form]
            assert texts.padding == f"RowPadding(launch=Rounding({launch}), sequence=Rounding({sequence}))"
            assert texts.prefix_tokens  # states are kept at the ends of messages, which these prompts have not
        assert texts.policy == "exact" and not any(texts.differ.values()), texts
