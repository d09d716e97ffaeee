"""As much of ``tensorrt`` as building an engine takes, up to the builder: it writes down what it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

_DTYPES = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF", onnx.TensorProto.INT64: "INT64"}


class Members:
    """An enumeration: every name is a member, and is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class Config:
    """What was set, by name; flags in ``flags``."""

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
    """The inputs and outputs of a parsed file; it holds no layers."""

    name = ""

    def __init__(self, recording: Recording, flags: int) -> None:
        assert flags == 1 << recording.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def read(self, path: str) -> bool:
        graph = onnx.load(path).graph  # with its weights, which lie beside it
        self.inputs, self.outputs = ([self._tensor(v) for v in values] for values in (graph.input, graph.output))
        return True

    @staticmethod
    def _tensor(value: onnx.ValueInfoProto) -> Any:
        return SimpleNamespace(name=value.name, dtype=SimpleNamespace(name=_DTYPES[value.type.tensor_type.elem_type]))

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple] = {}

    def set_shape(self, name: str, low: tuple, usual: tuple, high: tuple) -> None:
        self.shapes[name] = (low, usual, high)


class Recording:
    """``builds``: network name and configuration of every engine that was asked for. ``trt``: the module."""

    def __init__(self, version: str) -> None:
        self.builds: list[tuple[str, Config]] = []
        self.parsed: list[Path] = []
        self.trt = SimpleNamespace(
            __version__=version,
            ILogger=type("ILogger", (), {"ERROR": 1}),
            IProgressMonitor=type("IProgressMonitor", (), {}),
            NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
            ProfilingVerbosity=Members(),
            BuilderFlag=Members(),
            HardwareCompatibilityLevel=Members(),
            Builder=lambda log: self,
            OnnxParser=lambda network, log: SimpleNamespace(parse_from_file=lambda path: self._parse(network, path)),
        )

    def _parse(self, network: Network, path: str) -> bool:
        self.parsed.append(Path(path))
        return network.read(path)

    def create_network(self, flags: int) -> Network:
        return Network(self, flags)

    def create_builder_config(self) -> Config:
        return Config(self)

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes:
        self.builds.append((network.name, config))
        return f"plan of {network.name}".encode()
