"""Reference of csrc/exit_select.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Selection:
    """``continue_hidden`` [C, H], ``continue_origin`` [C] (None without origin), ``head_input``: the given one, exits written."""

    continue_hidden: NDArray[Any]
    continue_origin: Rows | None
    head_input: NDArray[Any]


def exit_select(
    hidden: NDArray[Any],
    exit_states: NDArray[Any],
    exit_rows: Rows,
    continue_rows: Rows,
    head_input: NDArray[Any],
    origin: Rows | None = None,
) -> Selection:
    """Gather the continuing rows and scatter the exited ones.

    Args:
        hidden, exit_states: [N, H].
        exit_rows, continue_rows: indices into 0 … N - 1, ascending.
        head_input: [M, H]; rows that receive no exited row keep their values.
        origin: [N] index of each row in ``head_input``; None: exited rows are packed.
    """
    written = head_input.copy()
    written[np.arange(len(exit_rows)) if origin is None else origin[exit_rows]] = exit_states[exit_rows]
    return Selection(hidden[continue_rows], None if origin is None else origin[continue_rows], written)
