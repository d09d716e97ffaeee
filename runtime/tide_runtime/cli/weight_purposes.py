"""What the bytes of a bundle are for: ``tide-inspect`` shows it."""

from __future__ import annotations

from collections import Counter

from tide_runtime.backends.onnxruntime.model_proto import weight_uses
from tide_runtime.backends.onnxruntime.packed_weights import packed_folder
from tide_runtime.bundle import Bundle
from tide_runtime.cached_folders import folder_bytes
from tide_runtime.errors import BundleError

PRODUCTS = "products"
SCALES = "scales of blocks"
EMBEDDING = "embedding, where not tied"
OTHER = "norms and tables"
# Operator and operand → purpose; the first one that a weight has in this order, so that a tied head counts as a product.
_PURPOSES = {
    ("MatMulNBits", 1): PRODUCTS,
    ("MatMul", 1): PRODUCTS,
    ("Gemm", 1): PRODUCTS,
    **{("MatMulNBits", operand): SCALES for operand in (2, 3)},
    **{("GatherBlockQuantized", operand): SCALES for operand in (2, 3)},
    ("GatherBlockQuantized", 0): EMBEDDING,
    ("Gather", 0): EMBEDDING,
}


def byte_purposes(bundle: Bundle, target: str) -> dict[str, int]:
    """Bytes of an ONNX target by purpose, and of the tokenizer; last, what this machine's cache holds of it in packed layout.

    Empty for targets that are engines. Raises BundleError if a graph cannot be read.
    """
    info = bundle.manifest.targets[target]
    files = bundle.manifest.files
    if info.weights is None or info.engines:
        return {}
    found: dict[tuple[int, int], str] = {}
    for file in info.graphs.values():
        try:
            for operator, operand, *place in weight_uses(bundle.path(file).read_bytes()):
                purposes = [_PURPOSES.get((operator, operand), OTHER), found.get((place[0], place[1]), OTHER)]
                found[place[0], place[1]] = min(purposes, key=[*_PURPOSES.values(), OTHER].index)
        except (ValueError, KeyError) as error:
            raise BundleError(f"{file} cannot be read ({error}); export the bundle again") from error
    sizes: Counter[str] = Counter({PRODUCTS: 0, SCALES: 0, EMBEDDING: 0, OTHER: 0})
    for (_, length), purpose in found.items():
        sizes[purpose] += length
    others = files[info.weights].bytes - sizes.total()
    graphs = {*info.graphs.values(), *([info.products] if info.products is not None else [])}
    tokenizer = sum(info.bytes for name, info in files.items() if name.startswith("tokenizer/"))
    packed = packed_folder(bundle, target)
    return {
        **sizes,
        "other targets, and padding": others,
        "graphs": sum(files[name].bytes for name in graphs),
        "tokenizer": tokenizer,
        "packed in this machine's cache": folder_bytes(packed) if packed is not None else 0,
    }
