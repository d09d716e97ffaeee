"""Weights that the sessions of a target have in common, over host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from runtime.host_device import HostDevice
from tide_runtime import ThreadOptions
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.backends.onnxruntime.device_weights import _LEAST_BYTES, DeviceWeights
from tide_runtime.backends.onnxruntime.model_proto import external_weights
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError


def test_every_form_reads_one_copy_on_the_device(bundle: Path) -> None:
    """Guards against an 8B model that takes 32 GB: once for each form of a segment, the head, and filling caches."""
    device = HostDevice()
    backend = OnnxRuntimeCudaBackend.load(Bundle.open(bundle), "cuda", ThreadOptions(1), device, ("CPUExecutionProvider", {}))
    assert backend.weights is not None
    before, info = backend.weights.bytes, backend.manifest.targets["cuda"]
    for form in info.graphs:
        backend.session(form)
    places = {
        (weight.offset, weight.length)
        for file in info.graphs.values()
        for weight in external_weights((bundle / file).read_bytes())
        if weight.length >= _LEAST_BYTES
    }
    total = sum(length for _, length in places)
    assert before > 0 and total <= backend.weights.bytes <= total + 256 * len(places)

    def first_states(form: str) -> np.ndarray:
        step = backend.context(1).step(0, [3])
        step.input_ids[:3] = [5, 6, 7]
        step.place([0])
        backend._fused = form == "segment_0"
        step.run("segment_0")
        return np.array(step.hidden[0])

    computed = [first_states(form) for form in ("segment_0", "segment_0.batched")]
    for arena in backend.weights._arenas:
        device.zero(arena.pointer, arena.bytes)  # the embedding too, which no session packs
    for form, states in zip(("segment_0", "segment_0.batched"), computed, strict=True):
        assert states.any() and not first_states(form).any(), f"{form} has a copy of its own"


def test_weights_are_described_as_onnx_describes_them(bundle: Path) -> None:
    """Guards against weights of another place, shape or type than the graph's: a wrong model."""
    for file in Bundle.open(bundle).manifest.targets["cuda"].graphs.values():
        model = onnx.load(bundle / file, load_external_data=False)
        wanted = [
            (tensor.name, tensor.data_type, tuple(tensor.dims), place.offset or 0, place.length)
            for tensor in model.graph.initializer
            if uses_external_data(tensor)
            for place in [ExternalDataInfo(tensor)]
        ]
        assert [tuple(weight) for weight in external_weights((bundle / file).read_bytes())] == wanted


def test_a_file_that_ends_early_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Guards against weights of zeros, or a fault of the process."""
    import onnxruntime

    info = Bundle.open(bundle).manifest.targets["cuda"]
    assert info.weights is not None
    cut = tmp_path / "weights.bin"
    cut.write_bytes((bundle / info.weights).read_bytes()[:5000])
    with pytest.raises(BundleError, match=r"weights.bin ends before the weights at \(\d+, \d+\)"):
        DeviceWeights(HostDevice(), cut).model(bundle / info.graphs["segment_0"], onnxruntime.SessionOptions())
