"""How launches are padded so that a token has the same bits whatever shares its launch, measured once per machine.

On many processors ONNX Runtime's low-bit kernels give a launch of one row, or the last of an odd number of rows, other bits than
the same row has in other launches, and attention sums in an order that depends on the slots that it reads. A text would then
change with the other requests of a batch, with the chunks of its prompt, and where policy ``exact`` verifies several tokens at
once: where activations are rounded to int8, a difference in the last bit may round to another number. Two measurements compare
rows bit by bit: one of every kind of low-bit product at every size of launch, on a graph that the exporter writes
(`TargetInfo.products`), and one of the whole model on a short text. The cheapest padding with which both agree is taken.

Measured with onnxruntime 1.32: 4-bit products of AVX2 and AVX need 2 rows at least, 8-bit products of AVX too; with AVX512-VNNI
blocks of 64 weights and more (8 bits: 128) need an even number of rows; products of smaller blocks there, and all with SSE4, need
no padding. Attention sums a row that is alone in another order, so a sequence needs one row after its tokens. With its tiles on
(see `ATTENTION_SWITCH`) processors without FMA (AVX, SSE4) need 3: the last terms after a multiple of four are summed apart,
and 3 slots of padding, whose weight is 0, keep real tokens out of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from tide_runtime.backends.launch_bits import LONG_TEXT_TOKENS, TEXT_TOKENS, WIDE_HEAD
from tide_runtime.backends.onnxruntime.sessions import ATTENTION_SWITCH
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.step_arrays import Rounding, RowPadding
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError
from tide_runtime.machine_cache import kept_result, processor

MIN_PADDING = RowPadding(Rounding(), Rounding(spare=1))  # GroupQueryAttention needs the row on every processor
LAUNCHES, SEQUENCES = (Rounding(), Rounding(2), Rounding(2, 2)), (MIN_PADDING.sequence, Rounding(spare=3))  # cheapest first
PADDINGS = tuple(RowPadding(launch, sequence) for launch in LAUNCHES for sequence in SEQUENCES)
SIZES = (*range(1, 18), 24, 32, 33, 64, 512)  # kernels change at tiles of 2, 4, 8, 12, 16 rows, and for their last rows
_ROWS = 64  # different rows; larger launches repeat them
_DTYPES: dict[str, type[np.floating]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class ProductSession(Protocol):
    """The part of `onnxruntime.InferenceSession` that the measurement uses. Inputs are [T, K] each."""

    def get_inputs(self) -> Sequence[Any]: ...

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> Sequence[Any]: ...


def bundle_row_padding(
    bundle: Bundle, target: str, threads: ThreadOptions, agree: Callable[[RowPadding], bool], adapters: Sequence[str] = ()
) -> RowPadding | None:
    """The first of `PADDINGS` with which every token keeps its bits, from the cache when this machine has measured it; None: no
    one of them does.

    Args:
        agree: see `launches_agree`.
        adapters: digests of those that ``agree`` runs.

    Raises BundleError when ONNX Runtime refuses the target's graphs.
    """
    info = bundle.manifest.targets[target]

    def measure() -> RowPadding | None:
        launches: Iterable[Rounding] = LAUNCHES
        if info.products is not None:
            file = str(bundle.path(info.products))
            options = session_options(threads, chained=False)
            products = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
            launches = (launch for launch in LAUNCHES if products_agree(products, launch))
        return next((p for launch in launches for p in PADDINGS if p.launch == launch and agree(p)), None)

    try:
        return cached_row_padding([*machine_key(bundle, target, threads), *adapters], measure)
    except Exception as error:  # ONNX Runtime raises unrelated exception classes
        file = info.products or target
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {file} ({error}); export the bundle again") from error


def machine_key(bundle: Bundle, target: str, threads: ThreadOptions, shape_only: bool = False) -> list[str]:
    """What results for a target depend on: its files, the kernels, and the threads, which divide a product among them.

    ``shape_only``: for times, which the values of weights do not change. Bundles of one shape, as fine-tuned models are, have the
    same graphs.
    """
    info = bundle.manifest.targets[target]
    files = bundle.manifest.files
    read = {info.products, *info.graphs.values(), None if shape_only else info.weights}
    used = sorted(file for file in read if file is not None)
    kernels = [processor(), ort.__version__, f"{ATTENTION_SWITCH}={os.environ.get(ATTENTION_SWITCH, '')}", str(threads.resolved)]
    return [*kernels, *(files[file].sha256 for file in used if file in files)]


def cached_row_padding(
    key: Sequence[str], measure: Callable[[], RowPadding | None], folder: Path | None = None
) -> RowPadding | None:
    """What ``measure`` returns, which is called only if ``folder`` (default: the user's cache) has no result for ``key``."""

    def decode(kept: Any) -> RowPadding | None:
        if kept is None:
            return None
        padding = RowPadding(*(Rounding(*part) for part in kept))
        if padding not in PADDINGS:
            raise ValueError(f"{kept} is not measured")
        return padding

    return kept_result(
        "row-padding",
        [*key, str((PADDINGS, SIZES, _ROWS, TEXT_TOKENS, WIDE_HEAD, LONG_TEXT_TOKENS))],
        measure,
        lambda p: p,
        decode,
        folder,
    )


def products_agree(session: ProductSession, padding: Rounding) -> bool:
    """Whether every row has the same bits in launches of all `SIZES`, rounded up by ``padding``.

    ``session``: maps inputs [T, K] to outputs [T, N], row by row. The rows are random, the same in every call.
    """
    random = np.random.default_rng(0)
    rows = {i.name: random.standard_normal((_ROWS, i.shape[-1])).astype(_DTYPES[i.type]) for i in session.get_inputs()}

    def launch(first: int, size: int) -> list[bytes]:
        """The bits of ``size`` rows from ``first`` on; rows that follow pad the launch."""
        chosen = (first + np.arange(padding.up(size))) % _ROWS
        outputs = session.run(None, {name: array[chosen] for name, array in rows.items()})
        return [b"".join(output[row].tobytes() for output in outputs) for row in range(size)]

    alone = [launch(row, 1)[0] for row in range(_ROWS)]
    return all(launch(0, size) == [alone[row % _ROWS] for row in range(size)] for size in SIZES[1:])
