"""What all tests share: how they are divided among processes (`pytest -n`), and the graphs that torch traced."""

import functools
import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_once import run_folder
from tide_runtime.backends.onnxruntime import distribution

pytest_plugins = ["left_running"]
TESTS = Path(__file__).parent

# Files that take long, the longest first: started last, one of them would run alone while the other processes are done.
LONG = (
    # slow ones
    "runtime/test_other_processors.py",
    "test_readme.py",
    "serve/cluster/test_cluster.py",
    "bench/test_cli.py",
    # others
    "export/graphs/test_loop_graph.py",
    "export/model/test_looped.py",
    "serve/http/test_draining.py",
    "calibrate/test_calibrate_cli.py",
    "export/drafters/test_draft_graph.py",
    "export/drafters/test_draft_cache.py",
    "plugins/test_kernels_on_host.py",
    "export/sources/gguf/test_gguf_tokenizer.py",
    "calibrate/capture/test_compiled_pass.py",
    "export/test_export.py",
    "runtime/test_recurrent.py",
    "runtime/depth/test_exact_sampling.py",
    "runtime/test_cli.py",
    "runtime/device_loop/test_decode_loop.py",
    "serve/test_clients.py",
)


@pytest.fixture(autouse=True)
def _plain_loggers() -> None:
    """A command that an earlier test ran in this process has given its loggers handlers, which `caplog` would not see behind."""
    for name in ("tide_runtime", "tide_serve", "tide_serve.access", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook (not under pytest 9, which keeps node ids elsewhere)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one architecture share its bundle, other tests stay with their file; some architectures' tests are slow ones."""
    module = sys.modules.get("export.architectures")
    architectures, slow = getattr(module, "ARCHITECTURES", ()), getattr(module, "SLOW", ())
    parallel = config.pluginmanager.hasplugin("xdist")
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = str(parameters.get("name", parameters.get("architecture")))
        if name in slow:
            item.add_marker(pytest.mark.slow)
        if parallel:
            item.add_marker(pytest.mark.xdist_group(name if name in architectures else str(item.path)))
    if parallel:
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    file = _file(item)
    return LONG.index(file) if file in LONG else len(LONG)


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""


def pytest_collection_finish() -> None:
    """Torch's and transformers' modules hold a million objects, which each full collection would walk through. A trace makes
    many more, of which few die: collections as often as by default take a third of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Breaks: a test finds what an earlier run, or the user, has left in the machine's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CACHE_DIR", str(run_folder(tmp_path_factory) / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _packages_listed_once() -> None:
    """Each export asks which package brought ONNX Runtime: half of its time, where its graph was traced before."""
    distribution.packages_distributions = functools.cache(distribution.packages_distributions)


@pytest.fixture(scope="session", autouse=True)
def _traced_once() -> Iterator[None]:
    """Tests find the trace of a whole model in the cache of this run, also where its bundle is not verified."""
    if "torch" not in sys.modules:  # importing it takes seconds, and no test of this run uses it
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from tide_export.trace import trace_model as trace
    from tide_export.trace.trace_cache import kept_trace

    # Every export reads the signatures of hundreds of operators anew, for more than half a second.
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]
    traced = trace._traced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_traced", lambda model, kept: kept_trace(model, kept, lambda: traced(model, kept)))
        yield


@pytest.fixture
def traced_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch traces in this test, whatever was traced before."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
