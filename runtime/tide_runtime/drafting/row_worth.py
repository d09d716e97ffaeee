"""What a token more is worth in each row of a batch that nobody else waits to join.

While others wait, a row that is finished earlier makes room earlier, and a token is a token. Later the batch only shrinks: it
takes as long as its last row, and a row that is ahead of others saves no more than its own part of some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_TIE = 4  # tokens by which rows may differ and still be expected to finish together
_SURE = 0.5  # weight of all this against equal worth: a text may end before its limit, or be overtaken


def row_worth(left: Sequence[int], step_ms: Callable[[int], float]) -> list[float]:
    """Worth of a token in each row, 1 on average.

    Args:
        left: tokens that each row has to go at most.
        step_ms: a plain step of so many rows.

    The rows with most to go take steps of their own in the end, which are dear; the others, in the order in which they will
    leave, add to these what a further row adds.
    """
    rows = len(left)
    order = sorted(range(rows), key=lambda i: -left[i])
    worth, begin, each = [1.0] * rows, 0, step_ms(rows) / rows
    while begin < rows:
        end = begin
        while end < rows and left[order[begin]] - left[order[end]] <= _TIE:
            end += 1
        added = step_ms(end) - (step_ms(begin) if begin else 0.0)
        for i in order[begin:end]:
            worth[i] += _SURE * (added / (end - begin) / each - 1)
        begin = end
    return worth
