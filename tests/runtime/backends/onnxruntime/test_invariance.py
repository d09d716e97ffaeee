"""How many tokens may share a launch: measured bit by bit, once per machine and product."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.onnxruntime.invariance import SIZES, cached_invariant_tokens, invariant_tokens, launches_agree
from tide_runtime.errors import BundleError

KEY = ("processor", "1.31.0", "2", "products")


class FakeSession:
    """Doubles its rows; in launches of ``coarse`` rows or more the last bit of one element of row ``spoiled`` differs."""

    def __init__(self, coarse: float = np.inf, spoiled: int = -1) -> None:
        self.coarse, self.spoiled, self.launches = coarse, spoiled, 0

    def get_inputs(self) -> Sequence[Any]:
        return [SimpleNamespace(name=f"x_{k}", shape=["tokens", k], type="tensor(float)") for k in (4, 8)]

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> Sequence[Any]:
        self.launches += 1
        outputs = [2 * rows for rows in input_feed.values()]
        if len(outputs[0]) >= self.coarse:
            element = outputs[-1][self.spoiled, -1:]
            element[:] = np.nextafter(element, np.float32(np.inf))
        return outputs


def measure(session: FakeSession) -> Callable[[], int | None]:
    return lambda: invariant_tokens(session)


@pytest.mark.parametrize(("coarse", "tokens"), [(2, 1), (3, 2), (17, 16), (20, 17), (64, 33), (512, 64), (513, None)])
@pytest.mark.parametrize("spoiled", [0, -1])
def test_the_limit_is_the_last_size_before_the_first_that_differs(coarse: int, tokens: int | None, spoiled: int) -> None:
    """A bit of one row, the first or the last, of one of the products would go unseen, and verified text could change."""
    assert invariant_tokens(FakeSession(coarse, spoiled)) == tokens


def test_a_machine_measures_once(tmp_path) -> None:
    """Every load would take as long as the first."""
    measured, loaded = FakeSession(coarse=12), FakeSession()
    assert cached_invariant_tokens(KEY, measure(measured), tmp_path) == 11
    assert cached_invariant_tokens(KEY, measure(loaded), tmp_path) == 11
    assert loaded.launches == 0


def test_no_limit_is_cached_too(tmp_path) -> None:
    """The machines without a limit would measure at every load."""
    loaded = FakeSession()
    for session in (FakeSession(), loaded):
        assert cached_invariant_tokens(KEY, measure(session), tmp_path) is None
    assert loaded.launches == 0


@pytest.mark.parametrize("place", range(len(KEY)))
def test_another_machine_measures_again(tmp_path, place: int) -> None:
    """A limit would be taken over by another processor, release, number of threads or model."""
    other = [*KEY[:place], "other", *KEY[place + 1 :]]
    cached_invariant_tokens(KEY, measure(FakeSession()), tmp_path)
    assert cached_invariant_tokens(other, measure(FakeSession(coarse=2)), tmp_path) == 1


@pytest.mark.parametrize("damage", [b"", b"\xff{", b"[]", b"{}", b'{"tokens": 1000}', b'{"tokens": "2"}', b'{"tokens": [2]}'])
def test_a_damaged_result_is_measured_again(tmp_path, damage: bytes) -> None:
    """A file cut off by a full disk would stop every load, or allow launches that nobody measured."""
    cached_invariant_tokens(KEY, measure(FakeSession(coarse=12)), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert cached_invariant_tokens(KEY, measure(FakeSession(coarse=12)), tmp_path) == 11
    assert cached_invariant_tokens(KEY, measure(FakeSession()), tmp_path) == 11, "the file was not repaired"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path) -> None:
    """In a container with a read-only home, bundles would not load."""
    (tmp_path / "file").touch()
    assert cached_invariant_tokens(KEY, measure(FakeSession(coarse=12)), tmp_path / "file" / "cache") == 11


class FakeModel:
    """Logits are the token's id and its position; in steps whose counts are ``odd`` the last bit differs."""

    def __init__(self, odd: list[int]) -> None:
        self.odd = odd

    def context(self, capacity: int) -> Any:
        return SimpleNamespace(step=self.step, close=lambda: None)

    def step(self, first_index: int, counts: list[int], wanted: list[int]) -> Any:
        step = SimpleNamespace(input_ids=np.zeros(sum(counts), np.int64), logits=np.zeros((sum(counts), 2), np.float32))

        def place(cached: list[int]) -> None:
            step.logits[:, 0] = step.input_ids
            step.logits[:, 1] = [start + i for start, count in zip(cached, counts, strict=True) for i in range(count)]
            if counts == self.odd:
                step.logits[0, 1] = np.nextafter(step.logits[0, 1], np.float32(99))

        step.place, step.run = place, lambda graph: None
        return step


@pytest.mark.parametrize(("odd", "agree"), [([], True), ([6], False), ([1, 1], False), ([3, 1], False)])
def test_launches_agree_bit_by_bit(odd: list[int], agree: bool) -> None:
    """Drafts would be verified with other logits than those of single tokens: in one launch, in a batch, or in an uneven one."""
    assert launches_agree(FakeModel(odd), [["uncut"]], vocab_size=50) == agree


def product_model(block_size: int, accuracy_level: int) -> bytes:
    """One MatMulNBits of random 4-bit weights, K = 256, N = 72."""
    random, k, n = np.random.default_rng(0), 256, 72
    values = random.integers(0, 256, (n, k // block_size, block_size // 2), np.uint8)
    scales = random.uniform(0.001, 0.01, (n, k // block_size)).astype(np.float32)
    sizes = dict(K=k, N=n, bits=4, block_size=block_size, accuracy_level=accuracy_level)
    node = helper.make_node("MatMulNBits", ["x_256", "values", "scales"], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "products",
        [helper.make_tensor_value_info("x_256", TensorProto.FLOAT, ["tokens", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", n])],
        [numpy_helper.from_array(values, "values"), numpy_helper.from_array(scales, "scales")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def product_session(block_size: int, accuracy_level: int, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(product_model(block_size, accuracy_level), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("block_size", "accuracy_level"), [(32, 4), (128, 4), (32, 1)])
def test_what_is_measured_holds_on_this_machine(block_size: int, accuracy_level: int) -> None:
    """Rows of other values than the measured ones would differ within the limit: the measurement would be too coarse."""
    session = product_session(block_size, accuracy_level, threads=1)
    limit = invariant_tokens(session)
    assert limit is None or limit in SIZES
    rows = np.random.default_rng(1).standard_normal((limit or 256, 256)).astype(np.float32) * 7
    alone = np.concatenate([session.run(None, {"x_256": row[None]})[0] for row in rows])
    assert np.array_equal(session.run(None, {"x_256": rows})[0].view(np.uint32), alone.view(np.uint32))
    assert invariant_tokens(product_session(block_size, accuracy_level, threads=2)) == limit


@pytest.fixture
def low_bit_bundle(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A bundle with a graph of products, and an empty cache of results."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    manifest, model = json.loads((bundle_copy / "manifest.json").read_text()), product_model(32, 4)
    manifest["targets"]["cpu"]["products"] = file = "onnx/cpu.products.onnx"
    manifest["files"][file] = {"sha256": hashlib.sha256(model).hexdigest(), "bytes": len(model)}
    (bundle_copy / file).write_bytes(model)
    (bundle_copy / "manifest.json").write_text(json.dumps(manifest))
    return bundle_copy


def load(bundle: Path, policy: str = "exact") -> Engine:
    return Engine.load(bundle, EngineOptions(target="cpu", policy=policy, threads=ThreadOptions(1)))


@pytest.mark.parametrize(
    ("tokens", "says", "policy"), [(None, None, "exact"), (8, "at most 8 tokens", "exact"), (1, "as full", "full")]
)
def test_exact_takes_the_machines_limit(low_bit_bundle: Path, tmp_path: Path, tokens, says, policy) -> None:
    """What was measured would not reach the policy, or nobody would hear of it."""
    with warnings.catch_warnings(action="ignore"):
        load(low_bit_bundle).close()
    (result,) = (tmp_path / "cache/invariance").iterdir()
    result.write_text(json.dumps({"result": tokens}))
    with warnings.catch_warnings(record=True) as caught, load(low_bit_bundle) as engine:
        (generation,) = engine.generate([[5, 6, 7]], GenerationParams(max_new_tokens=4))
    assert [str(w.message) for w in caught] == ([engine.draft_limitation] if tokens == 1 else [])
    assert generation.stats.policy == policy
    assert engine.draft_limitation is None if says is None else says in str(engine.draft_limitation)


def test_other_policies_measure_nothing(low_bit_bundle: Path, tmp_path: Path) -> None:
    """Their first load would take longer for nothing."""
    with load(low_bit_bundle, "full") as engine:
        assert engine.draft_limitation is None
    assert not (tmp_path / "cache/invariance").exists()


def test_products_that_onnxruntime_refuses(low_bit_bundle: Path) -> None:
    """The user would see a traceback of ONNX Runtime's own exceptions."""
    manifest = json.loads((low_bit_bundle / "manifest.json").read_text())
    manifest["targets"]["cpu"]["products"] = manifest["tokenizer"]["file"]
    (low_bit_bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="cannot run tokenizer"):
        load(low_bit_bundle)
