"""The router's plugin in TensorRT engines: find its library and check that the parser used it.

Without the library TensorRT runs the operators of the router's function (`router_function`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tide_plugins.trt
from tide_plugins.trt.library import VARIABLE
from tide_runtime.errors import TargetError

from tide_export.progress import ExportProgress
from tide_export.router_function import DOMAIN, NAME, VERSION
from tide_export.targets.graph_files import GraphFile


def load_router_plugin(trt: Any, files: Iterable[GraphFile], progress: ExportProgress) -> str:
    """Load the library in ``$TIDE_PLUGINS_LIBRARY`` if ``files`` contain routers; returns its path, or ``""``.

    Raises TargetError if the plugin is registered already but the variable is unset: the engines would need an unknown library.
    """
    if not any(file.operators[NAME] for file in files):
        return ""
    library = os.environ.get(VARIABLE)
    if library:
        tide_plugins.trt.load(library)
        return str(Path(library).expanduser().resolve())
    if _is_registered(trt):
        raise TargetError(
            f"this process has loaded the router plugin; set {VARIABLE} to its library, which the engines will need"
        )
    progress.note(f"routers are built from TensorRT's own operators; set {VARIABLE} for the fused one (plugins/trt)")
    return ""


def plugin_key(library: str) -> str:
    """Part of every engine's cache key: engines depend on the library's kernels."""
    return f", router plugin {hashlib.sha256(Path(library).read_bytes()).hexdigest()[:8]}" if library else ""


def check_routers(trt: Any, network: Any, expected: int) -> None:
    """Raise TargetError if the plugin is registered and not all ``expected`` routers use it."""
    if not expected or not _is_registered(trt):
        return
    layers = (network.get_layer(i) for i in range(network.num_layers))
    made = sum(1 for layer in layers if layer.type == trt.LayerType.PLUGIN_V3)
    if made != expected:
        raise TargetError(
            f"{network.name}: the parser made {made} router plugins of {expected}, although the library is loaded; "
            f"unset {VARIABLE} to build with TensorRT's own operators, and please report it"
        )


def _is_registered(trt: Any) -> bool:
    return trt.get_plugin_registry().get_creator(NAME, str(VERSION), DOMAIN) is not None
