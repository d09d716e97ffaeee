"""ONNX Runtime on the CPU: the loaded target, its views, and what is measured of it on this machine when first read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, cached_property, partial
from typing import Any

import onnxruntime as ort

from tide_runtime.backends.base import uncounted
from tide_runtime.backends.graph_contract import decoder_layers
from tide_runtime.backends.launch_bits import LONG_TEXT_TOKENS, TEXT_TOKENS, WIDE_HEAD, launches_agree
from tide_runtime.backends.onnxruntime.activation_bits import set_activation_bits
from tide_runtime.backends.onnxruntime.adapted_graph import ADAPTED, AdaptedWeights, adapted_form, smoothing_scales
from tide_runtime.backends.onnxruntime.bound_steps import OnnxRuntimeContext
from tide_runtime.backends.onnxruntime.host_rows import HostSessions
from tide_runtime.backends.onnxruntime.invariance import MIN_PADDING, bundle_row_padding, machine_key
from tide_runtime.backends.onnxruntime.packed_weights import PackedWeights, packed_weights
from tide_runtime.backends.onnxruntime.sessions import CPU_PROVIDER, load_session
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.pass_costs import kept_loop_costs, kept_pass_costs
from tide_runtime.backends.step_arrays import NO_PADDING, RowPadding
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import ADVANCE, DRAFT, LOOP
from tide_runtime.errors import AdapterError, BundleError
from tide_runtime.lora import LoraAdapter


class OnnxRuntimeBackend(HostSessions):
    """The ``cpu`` target. Sessions may run in several threads; each caller needs its own ``ExecutionContext``."""

    name = "onnxruntime-cpu"
    packs_steps = True
    has_prefix_blocks = True
    measure_padding: Callable[[OnnxRuntimeBackend], RowPadding | None] = staticmethod(lambda _: NO_PADDING)  # see `row_padding`
    measure_passes: Callable[[OnnxRuntimeBackend], CostTable | None] = staticmethod(lambda _: None)  # see `pass_costs`
    measure_loops: Callable[[OnnxRuntimeBackend], CostTable | None] = staticmethod(lambda _: None)  # see `loop_costs`
    machine_key: Sequence[str] = ()  # see `invariance.machine_key`
    bits = "same"  # or ``fast``: launches are not padded
    private_weights = ""
    load_adapted: Callable[[Sequence[LoraAdapter]], ort.InferenceSession]  # the graph of all layers with adapters
    adapters: Sequence[LoraAdapter] = ()

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions, share_weights: bool = False) -> OnnxRuntimeBackend:
        """Load the graphs of ``target``. ``share_weights``: see `EngineOptions`.

        Raises BundleError when ONNX Runtime refuses a graph, it breaks the contract, or its attention is not padded, as in
        bundles of versions before the first release.
        """
        manifest = bundle.manifest
        files = bundle.manifest.targets[target].graphs
        if manifest.kv and not manifest.targets[target].pads_attention:
            raise BundleError(f"the graphs of target {target} do not pad attention: export the bundle again with this version")
        if manifest.is_recurrent and ADVANCE not in files:
            raise BundleError(f"target {target} lacks the graph {ADVANCE}, which undoes rejected drafts; export the bundle again")
        layers = decoder_layers(manifest, files)
        whole = {graph for graph, count in layers.items() if count == manifest.model.num_layers}
        whole.add(LOOP)  # of one sequence's steps the only graph
        packed = packed_weights(bundle, target, threads, shared=share_weights)

        def load(name: str, shared: PackedWeights | AdaptedWeights = packed) -> ort.InferenceSession:
            options = session_options(threads, chained=name not in whole)
            if manifest.has_integer_products:
                set_activation_bits(options)
            own = shared if name != ADVANCE else None  # it has no weights
            return load_session(bundle, name, files[name], options, [CPU_PROVIDER], own)

        backend = cls(manifest, layers, load)
        backend.private_weights = packed.reason
        chains = [backend.every_layer, *([[s.name for s in manifest.segments]] if manifest.calibration is not None else [])]
        has_wide_head = any(layer.kv is not None and layer.kv.key_dim > WIDE_HEAD for layer in manifest.layers)
        text_tokens = (TEXT_TOKENS, LONG_TEXT_TOKENS) if has_wide_head else (TEXT_TOKENS,)
        backend.measure_padding = lambda view: bundle_row_padding(
            bundle,
            target,
            threads,
            lambda padding: all(
                launches_agree(
                    partial(context, padding=padding), chains, manifest.model.vocab_size, manifest.max_seq_len, tokens=tokens
                )
                for tokens in text_tokens
                for context in (backend.context, *view.adapted_contexts())
            ),
            [*(adapter.digest for adapter in view.adapters), *view.adapted],
        )
        scales = cache(partial(smoothing_scales, bundle))
        backend.load_adapted = lambda adapters: load(
            backend.every_layer[0], AdaptedWeights(packed, adapters, backend.dtype, scales())
        )
        backend.machine_key = machine_key(bundle, target, threads)
        shape = machine_key(bundle, target, threads, shape_only=True)
        passes = manifest.max_seq_len, target
        backend.measure_passes = lambda view: kept_pass_costs([*shape, str(view.default_padding)], view.context, *passes)
        if LOOP in layers:
            backend.measure_loops = lambda view: kept_loop_costs(
                [*shape, str(view.default_padding)], partial(view.context, loops_as_rows=True), *passes
            )
        return backend

    def with_bits(self, bits: str) -> OnnxRuntimeBackend:
        return self if bits == self.bits else self._changed("row_padding", "pass_costs", "loop_costs", bits=bits)

    def with_adapters(self, adapters: Sequence[LoraAdapter]) -> OnnxRuntimeBackend:
        """The same sessions, and the graph of all layers with ``adapters``, for steps that have rows with one: with all of them,
        and with each alone, because a step reads the matrices of all that its graph has.

        Raises AdapterError where they do not fit the model, or it has no graph of all layers that runs each once.
        """
        if len(self.every_layer) > 1 or self.manifest.model.loops > 1:
            why = "runs its layers in loops" if self.manifest.model.loops > 1 else "has no graph of all layers on this target"
            raise AdapterError(f"this model {why}, so adapters cannot be added to it; merge them into it and export that")
        if [adapter.digest for adapter in adapters] == [adapter.digest for adapter in self.adapters]:
            return self
        forms = {ADAPTED: list(adapters)} if adapters else {}
        if len(adapters) > 1:
            forms |= {adapted_form(number): [one] for number, one in enumerate(adapters, 1)}
        adapted = {form: self.load_adapted(chosen) for form, chosen in forms.items()}
        return self._changed("row_padding", adapters=adapters, adapted=adapted)

    def adapted_contexts(self) -> list[Callable[..., OnnxRuntimeContext]]:
        """Makers of contexts of two rows: the model itself beside an adapter, and each adapter beside the next and the first
        beside the model."""

        def make(rows: tuple[int, int], capacity: int, padding: RowPadding) -> OnnxRuntimeContext:
            context = self.context(capacity, padding=padding)
            context.adapters = list(rows[:capacity])
            return context

        count = len(self.adapters)
        pairs = [(0, 1), (1, 0), *((n, n % count + 1) for n in range(1, count + 1))] if count else []
        return [partial(make, pair) for pair in pairs]

    def without_draft_head(self) -> OnnxRuntimeBackend:
        others = {graph: count for graph, count in self.layers.items() if graph != DRAFT}
        return self._changed(layers=others) if DRAFT in self.layers else self

    def _changed(self, *measured: str, **attributes: Any) -> OnnxRuntimeBackend:
        """The same sessions with other ``attributes``, for which what was ``measured`` does not hold."""
        view = copy(self)
        view.__dict__ = {name: kept for name, kept in vars(self).items() if name not in measured} | attributes
        return view

    @cached_property
    def row_padding(self) -> RowPadding | None:
        if self.bits != "same":
            return None
        with uncounted(self.launches):
            padding = self.measure_padding(self)
            if padding is None and len(self.adapted) > 1:  # graphs with one adapter may have other bits than the one with all
                self.adapted = {ADAPTED: self.adapted[ADAPTED]}
                padding = self.measure_padding(self)
        return padding

    @property
    def default_padding(self) -> RowPadding:
        """How the launches of its contexts are padded."""
        return NO_PADDING if self.bits == "fast" else self.row_padding or MIN_PADDING

    @cached_property
    def pass_costs(self) -> CostTable | None:
        with uncounted(self.launches):
            return self.measure_passes(self)

    @cached_property
    def loop_costs(self) -> CostTable | None:
        """What launches of `LOOP` take, by tokens of each sequence; None where there is none."""
        with uncounted(self.launches):
            return self.measure_loops(self)

    @property
    def bits_key(self) -> list[str]:
        return [*self.machine_key, str(self.default_padding), *(adapter.digest for adapter in self.adapters)]

    def context(
        self, capacity: int, prefix_blocks: int = 0, *, padding: RowPadding | None = None, loops_as_rows: bool = False
    ) -> OnnxRuntimeContext:
        """See `Backend`.

        Args:
            padding: replaces `default_padding`, to measure what it does.
            loops_as_rows: for `OnnxRuntimeContext.loop_step`. Other steps then take one sequence each.
        """
        loops = self.manifest.model.loops if loops_as_rows else 1
        return OnnxRuntimeContext(self, capacity, prefix_blocks, padding or self.default_padding, loops)
