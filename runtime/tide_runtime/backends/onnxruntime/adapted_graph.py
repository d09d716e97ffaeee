"""The uncut graph with LoRA adapters: low-rank products beside the base products, whose weights stay as they are.

All adapters' matrices are stacked: beside y = x · W a product computes y + (x · A ⊙ m) · B, with A [K, R] and B [R, N] of all
adapters side by side, R their ranks together. The mask m [T, R] is looked up by `ADAPTER_ROWS`, the adapter of each token: it
leaves a token its own adapter's ranks, and none where it has no adapter. The rest of the sum is then exact zeros, so that a token
has the same bits whichever adapters the others in its launch have. A product of several modules (query, key and value; gate and
up) has their ranks side by side too, and B is zero outside of each module's part.

A step reads the matrices of all adapters that its graph has, so the backend keeps such a graph for each adapter alone as well.
Beside weights in few bits A has 8 bits, and B the precision of the activations: in 8 bits too, B costs a step of one token less
and one of eight tokens more. Matrices gathered for each row would be read once for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.graph_contract import ADAPTER_ROWS
from tide_runtime.backends.onnxruntime.model_proto import node_message, with_nodes, with_renamed_outputs
from tide_runtime.backends.onnxruntime.packed_weights import PackedWeights
from tide_runtime.backends.onnxruntime.products import ModuleShape, Product, products
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import SMOOTHING_FILE
from tide_runtime.errors import AdapterError
from tide_runtime.lora import LoraAdapter

ADAPTED = "adapted"  # form of the graph of all layers, for tokens of any adapters
MS_DOMAIN = "com.microsoft"
_BLOCK = 32  # weights with one scale
_MAX_LISTED = 5
_MAX_BYTES = 2**31 - 2**20  # size limit of a protobuf message, 2 GiB, less room for the other fields


def adapted_form(*adapters: int) -> str:
    """Name of the graph of all layers whose tokens have the one of ``adapters`` or none, or any where there are several."""
    return f"{ADAPTED}_{adapters[0]}" if len(adapters) == 1 else ADAPTED


@dataclass(frozen=True)
class AdaptedWeights:
    """A graph's own weights, and those of adapters, see `adapted_graph`."""

    base: PackedWeights
    adapters: Sequence[LoraAdapter]
    dtype: type[np.generic]
    smoothing: Mapping[str, NDArray[np.float32]]

    def model(self, graph: Path, options: ort.SessionOptions) -> bytes:
        """The bytes of ``graph`` with the adapters, for a session with ``options``."""
        model = self.base.model(graph, options)
        if model is None:
            model = graph.read_bytes()
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        return adapted_graph(model, self.adapters, self.dtype, self.smoothing)


def smoothing_scales(bundle: Bundle) -> dict[str, NDArray[np.float32]]:
    """Module → what its input is divided by before its integer product; modules that are not there have ones."""
    from safetensors.numpy import load_file

    return load_file(bundle.path(SMOOTHING_FILE)) if SMOOTHING_FILE in bundle.manifest.files else {}


def adapted_graph(
    model: bytes,
    adapters: Sequence[LoraAdapter],
    dtype: type[np.generic],
    smoothing: Mapping[str, NDArray[np.float32]] | None = None,
) -> bytes:
    """``model`` with the input `ADAPTER_ROWS` and the products of ``adapters``, the first of which is number 1.

    Args:
        dtype: of the graph's activations.
        smoothing: see `smoothing_scales`.

    Raises AdapterError where an adapter has a module that the graph's products have not, or has in another shape, or where the
    adapters are too large together.
    """
    found = products(model)
    for adapter in adapters:
        _check(adapter, found)
    edit = _Edit(adapters, dtype, smoothing or {})
    changed = [product for product in found if edit.add(product)]
    size = sum(array.nbytes for array in edit.arrays.values())
    if size + len(model) > _MAX_BYTES:
        raise AdapterError(f"the adapters have {size / 2**30:.1f} GiB together, a graph holds 2; load fewer of them")
    renamed = with_renamed_outputs(model, {product.value: f"{product.value}.base" for product in changed})
    return with_nodes(renamed, edit.nodes, edit.arrays, ADAPTER_ROWS)


def _check(adapter: LoraAdapter, found: Sequence[Product]) -> None:
    shapes = {module.name: module for product in found for module in product.modules}
    if not shapes:
        raise AdapterError(
            "the bundle does not tell which modules its products are: export it again, if an earlier version wrote it; models "
            "whose linear layers add their bias in the product (GPT-2) take no adapters"
        )
    absent = sorted(set(adapter.modules) - set(shapes))
    if absent:
        more = f" and {len(absent) - _MAX_LISTED} more" if len(absent) > _MAX_LISTED else ""
        raise AdapterError(
            f"adapter {adapter.name} adapts {', '.join(absent[:_MAX_LISTED])}{more}, which this model does not have as linear "
            f"products; it has {', '.join(sorted({name.rpartition('.')[2] for name in shapes}))}"
        )
    for name, pair in adapter.modules.items():
        own = ModuleShape(name, len(pair.up), pair.down.shape[1])
        if own != shapes[name]:
            raise AdapterError(
                f"adapter {adapter.name} has a weight of {own}, the model of {shapes[name]}: it was trained on another model"
            )


@dataclass
class _Edit:
    """Nodes and initializers that are added to a graph."""

    adapters: Sequence[LoraAdapter]
    dtype: type[np.generic]
    smoothing: Mapping[str, NDArray[np.float32]]
    nodes: list[bytes] = field(default_factory=list)
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def add(self, product: Product) -> bool:
        """Add the low-rank products beside ``product``; False: no adapter has one of its modules."""
        parts = [[_rank(adapter, module) for module in product.modules] for adapter in self.adapters]
        widths = [sum(ranks) for ranks in parts]
        if not any(widths):
            return False
        down, up = (
            np.zeros((sum(widths), product.modules[0].inputs), np.float32),
            np.zeros((product.width, sum(widths)), np.float32),
        )
        for adapter, (rank, row, module) in self._places(product, parts):
            if (pair := adapter.modules.get(module.name)) is not None:
                scales = self.smoothing.get(module.name) if product.integers else None
                down[rank : rank + len(pair.down)] = pair.down if scales is None else pair.down * scales
                up[row : row + module.outputs, rank : rank + len(pair.down)] = pair.up
        value = product.value
        self._product(product.source, down, f"{value}.down", product.low_bits)
        self.nodes.append(node_message("Mul", [f"{value}.down", self._mask(widths)], f"{value}.own"))
        self._product(f"{value}.own", up, f"{value}.up", low_bits=False)
        self.nodes.append(node_message("Add", [f"{value}.base", f"{value}.up"], value))
        return True

    def _places(
        self, product: Product, parts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[LoraAdapter, tuple[int, int, ModuleShape]]]:
        """Every adapter and module, with the first of its ranks and of the module's outputs."""
        rank = 0
        for adapter, ranks in zip(self.adapters, parts, strict=True):
            row = 0
            for module, count in zip(product.modules, ranks, strict=True):
                yield adapter, (rank, row, module)
                rank, row = rank + count, row + module.outputs

    def _mask(self, widths: Sequence[int]) -> str:
        """The value with the mask of adapters that have so many ranks each."""
        name = f"adapter_mask_{'_'.join(map(str, widths))}"
        if f"{name}.rows" not in self.arrays:
            owners = np.repeat(np.arange(1, len(widths) + 1), widths)
            self.arrays[f"{name}.rows"] = (owners == np.arange(len(widths) + 1)[:, None]).astype(self.dtype)
            self.nodes.append(node_message("Gather", [f"{name}.rows", ADAPTER_ROWS], name))
        return name

    def _product(self, source: str, weight: NDArray[np.float32], value: str, low_bits: bool) -> None:
        """Add ``value`` = ``source`` · ``weight`` [N, K] transposed."""
        rows, columns = weight.shape
        if low_bits:
            values, scales = _in_8_bits(weight)
            self.arrays |= {f"{value}.values": values, f"{value}.scales": scales.astype(self.dtype)}
            attributes = {"K": columns, "N": rows, "bits": 8, "block_size": _BLOCK, "accuracy_level": 4}
            inputs = [source, f"{value}.values", f"{value}.scales"]
            self.nodes.append(node_message("MatMulNBits", inputs, value, MS_DOMAIN, attributes))
        else:
            self.arrays[f"{value}.weight"] = weight.T.astype(self.dtype)
            self.nodes.append(node_message("MatMul", [source, f"{value}.weight"], value))


def _rank(adapter: LoraAdapter, module: ModuleShape) -> int:
    pair = adapter.modules.get(module.name)
    return 0 if pair is None else len(pair.down)


def _in_8_bits(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Values [N, blocks, block] and scales [N, blocks]: scale · (value - 128) is ``weight`` [N, K], padded with zeros."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // _BLOCK) * _BLOCK), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, -1, _BLOCK)
    scales = np.abs(blocks).max(-1) / 127
    steps = np.rint(blocks / np.where(scales == 0, 1, scales)[..., None])
    return (steps + 128).astype(np.uint8), scales.astype(np.float32)
