"""Target torch on CPU torch: the tokens and logits of target cpu, and the loops that a GPU's driver runs, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime.backends.uneven_steps import uneven_logits
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.step_arrays import NO_PADDING
from tide_runtime.backends.torch.backend import TorchBackend
from tide_runtime.backends.torch.stream import ProcessorStream
from tide_runtime.bundle import Bundle
from tide_runtime.depth.policy import DevicePlan
from tide_runtime.device_loop import driver_choice
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.row_sampling import DeviceRowSampling
from tide_runtime.errors import CacheFullError, TargetError

PROMPTS = [[5, 6, 7, 8, 9, 10], [3, 4], [100] * 30, [17, 17, 17]]
PARAMS = GenerationParams(max_new_tokens=24)


def load(bundle: Path, target: str, policy: str = "full", rows: int = 4) -> Engine:
    options = EngineOptions(threads=ThreadOptions(1), target=target, policy=policy, device="cpu", max_batch=rows)
    return Engine.load(bundle, options)


@pytest.fixture(scope="module")
def on_torch(bundle: Path) -> Iterator[Engine]:
    with load(bundle, "torch") as engine:
        yield engine


@pytest.fixture(scope="module")
def tokens(exits_bundle: Path) -> Callable[[str], list[tuple[int, ...]]]:
    """Tokens of target cpu under a policy."""

    def generate(policy: str) -> list[tuple[int, ...]]:
        with load(exits_bundle, "cpu", policy) as engine:
            return [row.token_ids for row in engine.generate(PROMPTS, PARAMS)]

    return generate


@pytest.mark.parametrize("policy", ["full", "exact", "exit"])
@pytest.mark.parametrize("rows", [1, 4])
def test_tokens_are_the_cpu_targets(exits_bundle: Path, tokens: Callable, policy: str, rows: int) -> None:
    """Guards against wrong operators, masks and bindings, alone and in ragged batches."""
    with load(exits_bundle, "torch", policy, rows) as engine:
        assert [row.token_ids for row in engine.generate(PROMPTS, PARAMS)] == tokens(policy)


def test_rows_of_uneven_length_compute_the_cpu_targets_logits(bundle: Path, on_torch: Engine) -> None:
    """Guards against tokens written to another sequence's cache when drafts are verified in batches."""
    with load(bundle, "cpu") as cpu:
        found = [uneven_logits(engine) for engine in (cpu, on_torch)]
    np.testing.assert_allclose(found[1], found[0], atol=5e-5)  # the targets' attentions sum in another order


def test_a_full_cache_is_refused(on_torch: Engine) -> None:
    """Guards against writes past the end of a cache."""
    step = on_torch.backend.context(1).step(0, [4])
    with pytest.raises(CacheFullError, match="ends at slot 66, the KV cache has 64"):
        step.place([62])


def test_texts_are_scored(bundle: Path, on_torch: Engine) -> None:
    """Guards against logits that scoring reads as a host's array, which those of a device are not."""
    with load(bundle, "cpu") as cpu:
        scores = [engine.score(PROMPTS[0]).logprobs for engine in (cpu, on_torch)]
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-5)


class SimulatedStream(ProcessorStream):
    """What a stream that may be captured does: work is recorded."""

    def run(self, work: Callable[[], None]) -> None:
        gpu: SimulatedGpu = self.device  # type: ignore[assignment]
        gpu.submit(gpu.stream, lambda: ProcessorStream.run(self, work))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("policy", ["full", "exit"])
def test_loops_on_the_device_run_its_graphs(exits_bundle: Path, policy: str, rows: int) -> None:
    """Guards against segments that conditional bodies refuse, or that read lengths on the host, which a loop does not update."""
    gpu = SimulatedGpu()
    backend = TorchBackend(Bundle.open(exits_bundle), "torch", SimulatedStream(gpu))
    backend.min_slots = 16  # of 64: the texts of these tests outgrow them
    drivers = Drivers(HostDriver(gpu).compile, GraphDriver(gpu).compile)
    with load(exits_bundle, "cpu", policy, rows) as engine:
        plan = engine.policy.device_plan()
        assert isinstance(plan, DevicePlan)
        with Engine(engine.bundle, engine.options, backend=engine.backend, policy=plan.host) as always:  # type: ignore[arg-type]
            expected = [row.token_ids for row in always.generate(PROMPTS, PARAMS)]
        driven = DeviceLoopPolicy(plan, NumpyLoopKernels(gpu), 5, drivers, 4)
        with Engine(engine.bundle, engine.options, backend=backend, policy=driven) as looped:  # type: ignore[arg-type]
            assert [row.token_ids for row in looped.generate(PROMPTS, PARAMS)] == expected
    assert gpu.graph_launches > 0 and drivers.execution is not None and drivers.execution.refusal is None


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_are_verified_on_the_device(bundle: Path, rows: int) -> None:
    """Guards against passes over several tokens of each sequence that read or write at the places of other tokens."""
    gpu = SimulatedGpu()
    backend = TorchBackend(Bundle.open(bundle), "torch", SimulatedStream(gpu))
    drivers = Drivers(HostDriver(gpu).compile, GraphDriver(gpu).compile)
    with load(bundle, "cpu", "full", rows) as full, load(bundle, "cpu", "exact", rows) as exact:
        plan = exact.policy.device_plan()  # type: ignore[attr-defined]
        cheap = replace(plan, drafts=replace(plan.drafts, pass_ms=lambda _, tokens: 1.0))  # not what this machine measured
        driven = DeviceLoopPolicy(cheap, NumpyLoopKernels(gpu), 5, drivers)
        with Engine(full.bundle, full.options, backend=backend, policy=driven) as looped:  # type: ignore[arg-type]
            made = looped.generate(PROMPTS, PARAMS)
            assert [row.token_ids for row in made] == [row.token_ids for row in full.generate(PROMPTS, PARAMS)]
    assert sum(row.stats.drafted.get("ngram", 0) for row in made) > 10 and drivers.execution is not None


def no_kernels(name: str) -> None:
    raise TargetError("no kernels here")


@pytest.mark.parametrize("policy", ["exact", "auto"])
def test_steps_are_graphs_and_drafts_are_priced(
    bundle: Path, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against drafts that a GPU's engine does not make, and steps that it queues kernel by kernel."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    gpu = SimulatedGpu()
    backend = TorchBackend(Bundle.open(bundle), "torch", SimulatedStream(gpu))
    backend.min_slots, backend.machine_key = 16, ["the simulated GPU"]
    backend.row_padding = NO_PADDING  # else auto is full
    vocab = backend.manifest.model.vocab_size
    backend.row_sampling = DeviceRowSampling(gpu, NumpyLoopKernels(gpu), backend.logits_element, vocab)
    monkeypatch.setattr(driver_choice, "plugin", no_kernels)
    sampled = GenerationParams(max_new_tokens=24, temperature=0.8, top_k=20, seed=3)
    with load(bundle, "cpu") as cpu, Engine(cpu.bundle, EngineOptions(target="torch", policy=policy), backend=backend) as engine:
        assert engine.policy.name == "exact" and backend.pass_costs is not None
        before = gpu.graph_launches
        for params in (PARAMS, sampled):
            texts = engine.generate(PROMPTS, params)
            assert [text.token_ids for text in texts] == [text.token_ids for text in cpu.generate(PROMPTS, params)]
        assert any(text.stats.drafted for text in texts) and gpu.graph_launches - before > 10
        assert str(engine.drive) == "host-driven: no kernels here; steps are CUDA graphs"
