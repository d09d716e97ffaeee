"""How many tokens may share a launch without changing each other's bits, measured once per machine.

On some processors and for some block sizes the order of sums in ONNX Runtime's kernels depends on the number of rows, so policy
``exact`` would verify drafts with other logits than ``full`` computes. Where activations are rounded to int8, a difference in the
last bit may round to another number and change the text; elsewhere it matters only where two tokens are almost equally likely.
Two measurements compare rows alone and together, bit by bit: one of the whole model on a short text, in bundles whose attention
is padded, and one of every kind of low-bit product at many sizes, on a graph that the exporter writes (`TargetInfo.products`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError
from tide_runtime.machine_cache import kept_result, processor

SIZES = (*range(1, 18), 24, 32, 33, 64, 512)  # kernels change at tiles of 2, 4, 8, 12, 16 rows, and for their last rows
_ROWS = 64  # different rows; larger launches repeat them
_TEXT = 6  # tokens
_DTYPES: dict[str, type[np.floating]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class ContextMaker(Protocol):
    """The part of a backend that the measurement uses."""

    def context(self, capacity: int) -> ExecutionContext: ...


class ProductSession(Protocol):
    """The part of `onnxruntime.InferenceSession` that the measurement uses. Inputs are [T, K] each."""

    def get_inputs(self) -> Sequence[Any]: ...

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> Sequence[Any]: ...


def bundle_invariant_tokens(bundle: Bundle, target: str, threads: ThreadOptions, agree: Callable[[], bool]) -> int | None:
    """The most tokens of a launch that keep every token's bits, from the cache when this machine has measured it.

    None without a limit, and for bundles of older releases in fp32 or fp16, which have none. 1 where ``agree`` (see
    `launches_agree`) is False.
    Raises BundleError when ONNX Runtime refuses the target's graphs.
    """
    info = bundle.manifest.targets[target]
    if info.products is None and not info.pads_attention:
        return None

    def measure() -> int | None:
        if info.pads_attention and not agree():
            return 1
        if info.products is None:
            return None
        options = session_options(threads, chained=False)
        return invariant_tokens(
            ort.InferenceSession(str(bundle.path(info.products)), options, providers=["CPUExecutionProvider"])
        )

    try:
        return cached_invariant_tokens(machine_key(bundle, target, threads), measure)
    except Exception as error:  # ONNX Runtime raises unrelated exception classes
        file = info.products or target
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {file} ({error}); export the bundle again") from error


def machine_key(bundle: Bundle, target: str, threads: ThreadOptions) -> list[str]:
    """What results for a target depend on: its files, the kernels, and the threads, which divide a product among them."""
    info, files = bundle.manifest.targets[target], bundle.manifest.files
    used = sorted(file for file in {info.weights, info.products, *info.graphs.values()} if file is not None)
    return [processor(), ort.__version__, str(threads.resolved), *(files[file].sha256 for file in used if file in files)]


def cached_invariant_tokens(key: Sequence[str], measure: Callable[[], int | None], folder: Path | None = None) -> int | None:
    """What ``measure`` returns, which is called only if ``folder`` (default: the user's cache) has no result for ``key``."""

    def decode(tokens: Any) -> int | None:
        if tokens is not None and tokens not in SIZES:
            raise ValueError(f"{tokens} tokens were not measured")
        return None if tokens is None else int(tokens)

    return kept_result("invariance", [*key, str((SIZES, _ROWS, _TEXT))], measure, lambda tokens: tokens, decode, folder)


def launches_agree(backend: ContextMaker, chains: Iterable[Sequence[str]], vocab_size: int) -> bool:
    """Whether a text of a few tokens has the same logits, bit for bit, token by token, in one launch, and beside another text.

    This compares what products alone do not show: attention, norms, and the graphs together.

    Args:
        chains: lists of graphs that run all layers.
    """
    texts = np.random.default_rng(0).integers(0, vocab_size, (2, _TEXT))
    plans: list[list[list[int]]] = [[[_TEXT]], [[1, 1]] * _TEXT, [[1, 3], [3, 1], [2, 2]]]  # tokens of each text, step by step

    def logits(graphs: Sequence[str], plan: Sequence[Sequence[int]]) -> list[bytes]:
        """Run ``plan`` and return the first text's logits, a row for each token."""
        context, done, rows = backend.context(len(plan[0])), [0] * len(plan[0]), list[bytes]()
        for counts in plan:
            step, ends = context.step(0, counts, counts), [d + count for d, count in zip(done, counts, strict=True)]
            step.input_ids[: sum(counts)] = np.concatenate(
                [texts[i, d:end] for i, (d, end) in enumerate(zip(done, ends, strict=True))]
            )
            step.place(done)
            for graph in graphs:
                step.run(graph)
            rows += [row.tobytes() for row in step.logits[: counts[0]]]
            done = ends
        context.close()
        return rows

    first, *others = [list(chain) for chain in chains]
    alone = logits(first, [[1]] * _TEXT)
    runs = [*((first, plan) for plan in plans), *((chain, plans[-1]) for chain in others)]
    return all(logits(graphs, plan) == alone for graphs, plan in runs)


def invariant_tokens(session: ProductSession) -> int | None:
    """The most tokens T of `SIZES` such that no launch of up to T tokens changes a bit of any row; None: all of `SIZES`.

    ``session``: maps inputs [T, K] to outputs [T, N], row by row. The rows are random, the same in every call.
    """
    random = np.random.default_rng(0)
    rows = {i.name: random.standard_normal((_ROWS, i.shape[-1])).astype(_DTYPES[i.type]) for i in session.get_inputs()}

    def launch(chosen: NDArray[np.intp]) -> list[bytes]:
        outputs = session.run(None, {name: array[chosen] for name, array in rows.items()})
        return [b"".join(output[row].tobytes() for output in outputs) for row in range(len(chosen))]

    alone = [launch(np.array([row]))[0] for row in range(_ROWS)]
    for smaller, size in pairwise(SIZES):
        chosen = np.arange(size) % _ROWS
        if launch(chosen) != [alone[row] for row in chosen]:
            return smaller
    return None
