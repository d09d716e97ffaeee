"""Selection of the kernel image for a GPU."""

from __future__ import annotations

import pytest
from tide_runtime.bundle.architectures import ARCHITECTURES, architecture_for, architectures
from tide_runtime.errors import TargetError


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (70, "sm_70"),
        (72, "sm_70"),  # Xavier: no image of its own, 7.0's runs
        (75, "sm_75"),
        (89, "sm_89"),
        (90, "sm_90"),
        (101, "sm_100"),
        (103, "sm_103"),
        (121, "sm_121"),
        (122, "sm_121"),  # a cubin of the same major version, before PTX that the driver has to compile
        (130, "compute_121"),
    ],
)
def test_a_gpu_gets_its_own_image_or_the_nearest_it_can_load(compute: int, expected: str) -> None:
    """Guards against cubins that the driver rejects, and PTX where a cubin exists."""
    assert architecture_for(compute).name == expected


@pytest.mark.parametrize("compute", [61, 52])
def test_a_gpu_older_than_volta_is_refused_with_the_list(compute: int) -> None:
    """Guards against a CUDA error at the first launch."""
    with pytest.raises(TargetError, match=rf"{compute // 10}\.{compute % 10}.*sm_70, sm_75"):
        architecture_for(compute)


def test_names_are_taken_in_any_order_and_once() -> None:
    """Guards against an order of `--arch` that changes the order of the table."""
    assert [a.name for a in architectures("sm_90, sm_75,sm_90")] == ["sm_75", "sm_90"]
    assert architectures("all") == ARCHITECTURES


def test_a_mistyped_name_is_refused_with_the_list() -> None:
    """Guards against a typo that builds nothing successfully."""
    with pytest.raises(TargetError, match=r"sm90 is not supported; choose all, or some of sm_70.*compute_121"):
        architectures("sm_75,sm90")
