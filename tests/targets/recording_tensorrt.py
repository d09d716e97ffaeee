"""A fake of the ``tensorrt`` API that an engine build uses; it records the calls and builds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

_DTYPES = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF", onnx.TensorProto.INT64: "INT64"}


class Members:
    """A fake enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Config:
    """A fake builder configuration: attributes as set, flags in ``flags``."""

    def __init__(self, recording: Recording) -> None:
        self.__dict__.update(recording=recording, flags=set(), profiles=[])

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def create_timing_cache(self, known: bytes) -> Any:
        return SimpleNamespace(known=known, serialize=lambda: b"timings of " + known)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.__dict__["timing_cache"] = cache
        return cache.known != b"damaged"

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Network:
    """Inputs and outputs of a parsed file, and one layer per operator; constants that are added to it."""

    name = ""

    def __init__(self, recording: Recording, flags: int) -> None:
        assert flags == 1 << recording.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        self._recording = recording
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.layers: list[Any] = []

    def read(self, path: str) -> bool:
        graph = onnx.load(path).graph  # with its weights, which lie beside it
        self.layers = [SimpleNamespace(type=node.op_type) for node in graph.node]
        self.inputs, self.outputs = ([self._tensor(v) for v in values] for values in (graph.input, graph.output))
        return True

    @staticmethod
    def _tensor(value: onnx.ValueInfoProto) -> Any:
        return SimpleNamespace(name=value.name, dtype=SimpleNamespace(name=_DTYPES[value.type.tensor_type.elem_type]))

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))
    num_layers = property(lambda self: len(self.layers))

    def get_layer(self, index: int) -> Any:
        return self.layers[index]

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    def add_constant(self, shape: tuple[int, ...], array: Any) -> Any:
        assert array.shape == shape and array.flags.c_contiguous
        return SimpleNamespace(get_output=lambda index: array)

    def mark_output(self, tensor: Any) -> None:
        self.outputs.append(tensor)

    def unmark_output(self, tensor: Any) -> None:
        self.outputs.remove(tensor)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple] = {}

    def set_shape(self, name: str, low: tuple, usual: tuple, high: tuple) -> None:
        self.shapes[name] = (low, usual, high)


class Recording:
    """A fake module ``trt`` and its recorded calls.

    ``builds``: network name and configuration of every build; ``outputs``: of its network. ``errors``: log lines while
    ``parsing`` or ``building``, which succeed all the same. ``goes_on``: the answers of the last build's progress monitor.
    """

    def __init__(self, version: str) -> None:
        self.builds: list[tuple[str, Config]] = []
        self.outputs: dict[str, list[Any]] = {}
        self.parsed: list[Path] = []
        self.errors: dict[str, str] = {}
        self.goes_on: list[bool] = []
        self.trt = SimpleNamespace(
            __version__=version,
            ILogger=type("ILogger", (), {"ERROR": 1}),
            IProgressMonitor=type("IProgressMonitor", (), {}),
            NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
            ProfilingVerbosity=Members(),
            BuilderFlag=Members(),
            HardwareCompatibilityLevel=Members(),
            LayerType=Members(),
            Weights=lambda array: array,
            Builder=self._with_log,
            OnnxParser=lambda network, log: SimpleNamespace(parse_from_file=lambda path: self._parse(network, path)),
        )

    def _with_log(self, log: Any) -> Recording:
        self._log = log
        return self

    def _parse(self, network: Network, path: str) -> bool:
        self.parsed.append(Path(path))
        self._complain("parsing")
        return network.read(path)

    def _complain(self, doing: str) -> None:
        if doing in self.errors:
            self._log.log(self.trt.ILogger.ERROR, self.errors[doing])

    def create_network(self, flags: int) -> Network:
        return Network(self, flags)

    def create_builder_config(self) -> Config:
        return Config(self)

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        self.builds.append((network.name, config))
        self.outputs[network.name] = network.outputs
        self._complain("building")
        self.goes_on = list(_phases(config.progress_monitor))
        return f"plan of {network.name}".encode() if all(self.goes_on) else None


def _phases(monitor: Any) -> Iterator[bool]:
    """Run the phases of a build, one of them nested, through ``monitor``; yields its answers."""
    monitor.phase_start("read", None, 2)
    monitor.phase_finish("read")
    monitor.phase_start("build", None, 4)
    monitor.phase_start("time kernels", "build", 9)
    yield monitor.step_complete("build", 0)
    yield monitor.step_complete("time kernels", 7)
    monitor.phase_finish("time kernels")
    yield monitor.step_complete("build", 1)
    monitor.phase_finish("build")
