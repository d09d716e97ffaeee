"""How many tokens may share a launch without changing each other's bits, measured once per machine.

On some processors and for some block sizes the order of sums in ONNX Runtime's low-bit matrix products depends on the number of
rows. Then a token's logits depend on the tokens that share its launch, and policy ``exact`` would verify drafts with other logits
than ``full`` computes. The exporter writes a graph with one product of each kind (`TargetInfo.products`); here rows are computed
alone and together and compared bit by bit.

Results are kept in ``$TIDE_CACHE_DIR/invariance``, else ``$XDG_CACHE_HOME/tide/invariance``, else ``~/.cache/tide/invariance``.
The folder may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError

SIZES = (*range(1, 18), 24, 32, 33, 64, 256)  # kernels change at tiles of 2, 4, 8, 12, 16 rows, and for their last rows
_ROWS = 64  # different rows; larger launches repeat them
_DTYPES: dict[str, type[np.floating]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Of /proc/cpuinfo: what selects a kernel, on x86 and on Arm.
_PROCESSOR_FIELDS = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
}  # fmt: skip


class ProductSession(Protocol):
    """The part of `onnxruntime.InferenceSession` that the measurement uses. Inputs are [T, K] each."""

    def get_inputs(self) -> Sequence[Any]: ...

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> Sequence[Any]: ...


def bundle_invariant_tokens(bundle: Bundle, target: str, threads: ThreadOptions) -> int | None:
    """`invariant_tokens` of a target's low-bit products, from the cache when this machine has measured them; None without any.

    1 for int8 KV caches and more threads than query heads: ONNX Runtime then divides the cache of a single token over the idle
    threads, and sums in another order than for several tokens (https://github.com/microsoft/onnxruntime/pull/28695). A key that
    differs in its last bit may round to another int8.

    Raises BundleError when ONNX Runtime refuses the target's graph of products.
    """
    if bundle.manifest.cache_dtype == "int8" and threads.resolved > bundle.manifest.model.attention_heads:
        return 1
    file = bundle.manifest.targets[target].products
    if file is None:
        return None

    def open_session() -> ort.InferenceSession:
        options = session_options(threads, chained=False)
        return ort.InferenceSession(str(bundle.path(file)), options, providers=["CPUExecutionProvider"])

    # Threads divide a product along N, which may leave other columns for the kernels of the last few.
    key = (processor(), ort.__version__, str(threads.resolved), bundle.manifest.files[file].sha256)
    try:
        return cached_invariant_tokens(key, open_session)
    except Exception as error:  # ONNX Runtime raises unrelated exception classes
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {file} ({error}); export the bundle again") from error


def cached_invariant_tokens(
    key: Sequence[str], open_session: Callable[[], ProductSession], folder: Path | None = None
) -> int | None:
    """`invariant_tokens` of a session, which is opened only if ``folder`` (default: the user's cache) has no result for ``key``.

    A damaged result is measured again. Where ``folder`` cannot be written, every call measures.
    """
    digest = hashlib.sha256(json.dumps([*key, SIZES, _ROWS]).encode()).hexdigest()
    with suppress(OSError, ValueError, RuntimeError, KeyError, TypeError):  # RuntimeError: there is no home folder
        tokens = json.loads(((folder or default_cache_folder()) / digest).read_bytes())["tokens"]
        if tokens is None or tokens in SIZES:
            return None if tokens is None else int(tokens)
    measured = invariant_tokens(open_session())
    with suppress(OSError, RuntimeError):
        _write(folder or default_cache_folder(), digest, json.dumps({"tokens": measured, "key": [*key]}))
    return measured


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


def processor() -> str:
    """What kernels are selected by: the processor's model and instruction sets."""
    with suppress(OSError):
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        fields = [line.split(":", 1) for line in block.splitlines() if ":" in line]
        return json.dumps({name.strip(): value.strip() for name, value in fields if name.strip() in _PROCESSOR_FIELDS})
    return f"{platform.machine()} {platform.processor()} {platform.platform()}"


def default_cache_folder() -> Path:
    if folder := os.environ.get("TIDE_CACHE_DIR"):
        return Path(folder) / "invariance"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide" / "invariance"


def _write(folder: Path, name: str, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader sees a whole result or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="new-", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).rename(folder / name)
