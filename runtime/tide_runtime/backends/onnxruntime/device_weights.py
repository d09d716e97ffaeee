"""Weights of a target on a device, once for all of its sessions.

A session copies its initializers to the device: two forms of a segment and the head would hold the same weights
several times. An initializer that is handed over with `SessionOptions.add_initializer` is used in place instead, if the session
wants it on the device where it is (onnxruntime/core/framework/session_state_utils.cc, since pull request 5092); for another it
logs a warning and makes its own copy. It must be memory of the caller's, and an output that is bound to an address is such a
value. ONNX Runtime neither copies nor frees it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.onnxruntime.model_proto import ExternalWeight, constant_model, external_weights
from tide_runtime.errors import BundleError

_LEAST_BYTES = 4096  # of a weight: smaller ones may be sizes and indices, which belong in host memory
_CHUNK = 1 << 24  # bytes of one upload
_VALUE = "value"


class DeviceWeights:
    """The external weights of graphs over the file ``weights`` on ``device``, freed with this object.

    ``bytes``: their size. Raises DeviceMemoryError when memory is short.
    """

    def __init__(self, device: Device, weights: Path) -> None:
        self._device, self._file = device, weights
        self._session = ort.InferenceSession(constant_model(_VALUE), providers=["CPUExecutionProvider"])
        self._arenas: list[Arena] = []
        self._pointers: dict[tuple[int, int], int] = {}  # by offset and length in the file
        self._values: list[ort.OrtValue] = []  # options refer to them without keeping them

    @property
    def bytes(self) -> int:
        return sum(arena.bytes for arena in self._arenas)

    def model(self, graph: Path, options: ort.SessionOptions) -> None:
        """Hand the weights of ``graph`` to a session with ``options``; those that are not on the device yet are uploaded.

        Raises BundleError for weights that are not in the file.
        """
        shared = [weight for weight in external_weights(graph.read_bytes()) if weight.length >= _LEAST_BYTES]
        self._upload({(weight.offset, weight.length) for weight in shared} - set(self._pointers))
        for weight in shared:
            options.add_initializer(weight.name, self._value(weight))

    def _upload(self, places: set[tuple[int, int]]) -> None:
        if not places:
            return
        content = np.memmap(self._file, np.uint8, "r")
        if outside := [place for place in places if sum(place) > content.size]:
            raise BundleError(f"{self._file.name} ends before the weights at {sorted(outside)[0]}; export the bundle again")
        arena = Arena(self._device, {f"{offset} {length}": length for offset, length in sorted(places)})
        self._arenas.append(arena)
        for offset, length in sorted(places):
            pointer = self._pointers[offset, length] = arena.pointers[f"{offset} {length}"]
            for first in range(0, length, _CHUNK):
                part = content[offset + first : offset + min(first + _CHUNK, length)]
                self._device.upload_copy(pointer + first, part)
        self._device.synchronize()

    def _value(self, weight: ExternalWeight) -> ort.OrtValue:
        binding, device = self._session.io_binding(), self._device
        pointer = self._pointers[weight.offset, weight.length]
        binding.bind_output(_VALUE, device.kind, device.ordinal, weight.data_type, weight.shape, pointer)
        [value] = binding.get_outputs()
        self._values.append(value)
        return value
