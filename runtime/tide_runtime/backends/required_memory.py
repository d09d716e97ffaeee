"""What a target takes of a device's memory, from the bundle's files, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.backends.device.device_caches import GROWING_SLOTS, slots_for
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, FP32
from tide_runtime.backends.kv_caches import kv_bytes_per_token
from tide_runtime.backends.onnxruntime.model_proto import ExternalWeight, external_weights
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import DRAFT
from tide_runtime.errors import BundleError, DeviceMemoryError

_PROMPT_TOKENS = 512  # prompt tokens of a step, by default
_PEAK_BUFFERS_PER_LAYER = 4  # activation buffers of the layer's widest size that are alive at once
_CONTEXT_STEP = 256  # tokens; no shorter context is proposed
_INT4_SHARE = {4: 0.2, 2: 0.4}  # of the source, by bytes of its elements: 0.38 for a 1B model in fp16, less for larger ones


@dataclass(frozen=True)
class RequiredMemory:
    """Bytes that a target takes on a device, beside what the driver and libraries take for themselves.

    Args:
        weights: once for all forms of a graph.
        row: keys and values of a sequence.
        steps: inputs, outputs and intermediate tensors of the largest step, about.
        rows: sequences that run at once.
        context: tokens of the longest one.
    """

    weights: int
    row: int
    steps: int
    rows: int
    context: int

    @property
    def least(self) -> int:
        """Bytes with one sequence."""
        return self.weights + self.row + self.steps

    @property
    def total(self) -> int:
        return self.weights + self.rows * self.row + self.steps

    def rows_within(self, free: int) -> int:
        """Sequences of ``context`` tokens that fit into ``free`` bytes beside the rest."""
        return max(0, (free - self.weights - self.steps) // self.row)


def required_memory(bundle: Bundle, target: str, rows: int = 1, context: int | None = None) -> RequiredMemory:
    """Memory of ``rows`` sequences of ``context`` tokens; None: of max_seq_len. Raises BundleError if a graph cannot be read."""
    manifest = bundle.manifest
    info = bundle.manifest.targets[target]
    context = min(context or manifest.max_seq_len, manifest.max_seq_len)
    element = ELEMENT_TYPES[manifest.dtype]
    cache_bytes = ELEMENT_TYPES[manifest.cache_dtype].bytes
    shared = [] if info.engines else _shared_weights(bundle, target)
    weights = sum(manifest.files[file].bytes for file in info.graphs.values()) + sum(weight.length for weight in shared)
    if info.engines:  # built for all slots, and before TensorRT 10.15 with caches as outputs beside those of the inputs
        aliased = all(name in e.aliases for e in info.engines.values() for t in e.outputs if "_cache_out_" in (name := t.name))
        slots = manifest.max_seq_len * (1 if aliased else 2)
    else:
        slots = slots_for(context, manifest.max_seq_len, GROWING_SLOTS)
    tokens = max(rows, min(_PROMPT_TOKENS, context))
    model = manifest.model
    widths = [_width(weight, model.hidden_size) for weight in shared]
    widest = max([4 * model.hidden_size, *(width for width in widths if width < model.vocab_size)])
    states = tokens * element.bytes * (len(manifest.segments) * manifest.hidden_width + _PEAK_BUFFERS_PER_LAYER * widest)
    logits = rows * model.vocab_size * FP32.bytes
    row = slots * kv_bytes_per_token(manifest.caches if DRAFT in info.graphs else manifest.kv, cache_bytes)
    return RequiredMemory(weights, row, states + logits, rows, context)


def require_room(bundle: Bundle, target: str, device: CudaDevice) -> None:
    """Raise DeviceMemoryError when a target with one sequence of full length does not fit into what ``device`` has free."""
    free = device.free_memory()
    needed = required_memory(bundle, target)
    if free is not None and needed.least > free:
        raise DeviceMemoryError(
            f"target {target} does not fit on GPU {device.ordinal} ({device.name}): {shortage(bundle, target, free)}"
        )


def shortage(bundle: Bundle, target: str, free: int) -> str:
    """Why ``target`` with one sequence of full length does not fit into ``free`` bytes, and with what options it would."""
    needed = required_memory(bundle, target)
    manifest = bundle.manifest
    int4_share = 1.0 if manifest.weights else _INT4_SHARE[ELEMENT_TYPES[manifest.dtype].bytes]
    ways = _ways_to_fit(needed, free, int4_share)
    would = f"it would with {' or '.join(ways)}" if ways else "no option of tide-export helps: it takes a larger GPU"
    return (
        f"it takes about {_gib(needed.least)} ({_gib(needed.weights)} of weights, {_gib(needed.row)} of keys and "
        f"values of {needed.context:,} tokens, {_gib(needed.steps)} of a step), {_gib(free)} are free; {would}"
    )


def _ways_to_fit(needed: RequiredMemory, free: int, int4_share: float) -> list[str]:
    """Options of ``tide-export``. ``int4_share``: of the weights' bytes that int4 leaves; 1: they are in few bits already."""
    ways = list[str]()
    for options, weights in (("", needed.weights), (" --weights int4", int(int4_share * needed.weights))):
        room = free - weights - needed.steps
        tokens = needed.context if room >= needed.row else needed.context * room // needed.row // _CONTEXT_STEP * _CONTEXT_STEP
        if tokens == needed.context:
            return [*ways, f"tide-export{options}"]
        if tokens >= _CONTEXT_STEP:
            ways.append(f"tide-export{options} --max-seq-len {tokens}")
    return ways if int4_share < 1 else ways[:1]


def _shared_weights(bundle: Bundle, target: str) -> list[ExternalWeight]:
    """The weights of a target's graphs, each place in the file once."""
    found: dict[tuple[int, int], ExternalWeight] = {}
    for file in bundle.manifest.targets[target].graphs.values():
        try:
            found |= {(weight.offset, weight.length): weight for weight in external_weights(bundle.path(file).read_bytes())}
        except (ValueError, KeyError) as error:
            raise BundleError(f"{file} cannot be read ({error}); export the bundle again") from error
    return [*found.values()]


def _width(weight: ExternalWeight, hidden_size: int) -> int:
    """The other side of a matrix that reads or makes hidden states; of one in few bits, its outputs; else 0."""
    if len(weight.shape) == 3:
        return weight.shape[0]
    return prod(weight.shape) // hidden_size if len(weight.shape) == 2 and hidden_size in weight.shape else 0


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
