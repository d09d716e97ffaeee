"""What a depth policy is: it decides how deep each token goes and hands back tokens whose output is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tide_runtime.backends.base import Slots
from tide_runtime.row import Row


class DepthPolicy(Protocol):
    """One answer to "when is a token's output final?". Rows occupy the slots 0 … len(rows) - 1, in order."""

    name: str

    def prefill(self, slots: Slots, row: Row) -> int:
        """Run the row's prompt into its slot; returns the first output token."""

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        """Advance every row, ``row.length`` with it; returns each row's new final tokens: none while it waits for company."""
