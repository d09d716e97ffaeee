"""Parse a graph file into a TensorRT or TensorRT-RTX network, and check that it computes what the graph does.

TensorRT may report success for a wrong network and only log an error, and its ONNX parser may drop what it does not know (see
`attention_checks`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.manifest import ProfileInfo, TensorInfo
from tide_runtime.errors import TargetError

from tide_export.targets.attention_checks import cache_updates, check_attentions, check_cache_updates
from tide_export.targets.graph_files import GraphFile
from tide_export.targets.router_plugin import put_router

_DTYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}


@dataclass(frozen=True)
class EngineNetwork:
    """A network ready to build. ``aliases``: cache output → the cache input whose memory it shares.

    ``parser`` and ``weights`` own the weights that ``network`` refers to, so they live as long.
    """

    trt: Any
    file: GraphFile
    log: Any
    builder: Any
    network: Any
    parser: Any
    attentions: int
    aliases: dict[str, str]
    weights: Any

    @property
    def inputs(self) -> list[TensorInfo]:
        return [self._tensor(self.network.get_input(i)) for i in range(self.network.num_inputs)]

    @property
    def outputs(self) -> list[TensorInfo]:
        return [self._tensor(self.network.get_output(i)) for i in range(self.network.num_outputs)]

    def _tensor(self, tensor: Any) -> TensorInfo:
        return TensorInfo(tensor.name, _DTYPES[tensor.dtype.name], self.file.dims[tensor.name])


def read_network(trt: Any, file: GraphFile, fused_router: bool = False) -> EngineNetwork:
    """Parse ``file`` into a strongly typed network of module ``trt``; with ``fused_router`` a router is TIDE's plugin.

    Raises TargetError, with the parser's message, if parsing fails or the network differs from the graph.
    """
    log = build_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.name = file.name
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(file.path)):
        problems = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise TargetError(f"{file.name} cannot be parsed: {problems}. Please report the model's config")
    require_no_errors(log, f"parsing {file.name}")
    attentions, updates = file.operators["Attention"], file.operators["TensorScatter"]
    if attentions:  # releases without the operator lack its classes too
        check_attentions(trt, network, attentions)
    aliases = cache_updates(trt, network) if updates else {}
    check_cache_updates(network, aliases, updates)
    weights = put_router(trt, network, file) if fused_router else []
    return EngineNetwork(trt, file, log, builder, network, parser, attentions, aliases, weights)


def add_profiles(engine: EngineNetwork, config: Any, profiles: list[ProfileInfo]) -> None:
    """Add one optimization profile per kind of step."""
    for info in profiles:
        profile = engine.builder.create_optimization_profile()
        for tensor in engine.inputs:
            profile.set_shape(tensor.name, *(info.shape(tensor.shape, i) for i in range(3)))
        if config.add_optimization_profile(profile) < 0:
            raise TargetError(f"{engine.file.name}: TensorRT refuses the shapes of the profile {info.name}")


def build_log(trt: Any) -> Any:
    """A logger of module ``trt`` that keeps error lines in its list ``errors`` and drops the rest."""

    class BuildLog(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            with suppress(KeyboardInterrupt):  # the caller is C++; the build ends after its current step
                if severity <= trt.ILogger.ERROR:
                    self.errors.append(" ".join(message.split()))

    return BuildLog()


def require_no_errors(log: Any, doing: str) -> None:
    """Raise TargetError with the log's errors, if any."""
    if log.errors:
        raise TargetError(f"{doing}: TensorRT reports {'; '.join(log.errors)[:2000]}. Please report the model's config")
