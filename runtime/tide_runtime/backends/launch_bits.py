"""Whether a token has the same bits whatever shares its launch, measured on a short text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tide_runtime.backends.base import ExecutionContext

TEXT_TOKENS = 12  # attention sums in blocks of four
# Above `WIDE_HEAD`, MLAS sums a query's product with keys in two parts where a launch reads more than 64 of them, else in one.
WIDE_HEAD, LONG_TEXT_TOKENS = 128, 72


def launches_agree(
    make_context: Callable[[int], ExecutionContext],
    chains: Iterable[Sequence[str]],
    vocab_size: int,
    slots: int = TEXT_TOKENS,
    takes: Callable[[int, int], bool] = lambda rows, tokens: True,
    tokens: int = TEXT_TOKENS,
) -> bool:
    """Whether a text of ``tokens`` has the same logits, bit for bit, token by token, in one launch, and in a batch with another
    text.

    This compares what products alone do not show: attention, norms, and the graphs together.

    Args:
        make_context: makes a context for so many sequences, whose launches are padded as they will be.
        chains: lists of graphs that run all layers.
        takes: whether steps of so many sequences, and so many tokens of each, can be run; otherwise they are left out.
        slots: cache slots of a sequence; the texts end where the cache does.
    """
    tokens = min(tokens, slots)
    texts = np.random.default_rng(0).integers(0, vocab_size, (2, tokens))
    plans = [[[tokens]], [[5], [5], [2]], [[1, 3], [3, 1], [1, 1], [1, 1], [2, 2], [3, 2], [1, 1]]]  # tokens of each text by step
    plans = [plan for plan in plans if all(takes(len(counts), max(counts)) for counts in plan)]

    def logits(graphs: Sequence[str], plan: Sequence[Sequence[int]]) -> list[bytes]:
        """Run ``plan`` and return the first text's logits, a row for each token."""
        context = make_context(len(plan[0]))
        done = [0] * len(plan[0])
        rows = list[bytes]()
        for counts in plan:
            ends = [d + count for d, count in zip(done, counts, strict=True)]
            if max(ends) > tokens:
                break
            step = context.step(0, counts, counts)
            step.input_ids[: sum(counts)] = np.concatenate(
                [texts[i, d:end] for i, (d, end) in enumerate(zip(done, ends, strict=True))]
            )
            step.place(done)
            step.run_all(graphs)
            rows += [row.tobytes() for row in np.asarray(step.logits[: counts[0]])]
            done = ends
        context.close()
        return rows

    first, *others = [list(chain) for chain in chains]
    alone = logits(first, [[1]] * tokens)
    runs = [*((first, plan) for plan in plans), *((chain, plans[-1]) for chain in others)]
    return all(found == alone[: len(found)] for found in (logits(graphs, plan) for graphs, plan in runs))
