"""How launches are padded: measured bit by bit, once per machine and product."""

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.launch_bits import launches_agree
from tide_runtime.backends.onnxruntime.invariance import (
    LAUNCHES,
    MIN_PADDING,
    PADDINGS,
    cached_row_padding,
    products_agree,
)
from tide_runtime.backends.step_arrays import Rounding, RowPadding
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import BundleError

KEY = ("processor", "1.31.0", "2", "products")


class FakeSession:
    """Doubles its rows; ``differs(rows)`` names the row of a launch, if any, one of whose elements differs in the last bit."""

    def __init__(self, differs: Callable[[int], int | None] = lambda rows: None) -> None:
        self.differs, self.launches = differs, 0

    def get_inputs(self) -> Sequence[Any]:
        return [SimpleNamespace(name=f"x_{k}", shape=["tokens", k], type="tensor(float)") for k in (4, 8)]

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> Sequence[Any]:
        self.launches += 1
        outputs = [2 * rows for rows in input_feed.values()]
        spoiled = self.differs(len(outputs[0]))
        if spoiled is not None:
            element = outputs[-1][spoiled, -1:]
            element[:] = np.nextafter(element, np.float32(np.inf))
        return outputs


def alone(rows: int) -> int | None:
    """AVX2: a launch of one row differs."""
    return 0 if rows == 1 else None


def last_of_odd(rows: int) -> int | None:
    """AVX512-VNNI, large blocks: the last row of an odd number differs."""
    return rows - 1 if rows % 2 else None


def from_size(least: int, row: int) -> Callable[[int], int | None]:
    return lambda rows: row if rows >= least else None


def first_that_agrees(session: FakeSession) -> RowPadding | None:
    launch = next((launch for launch in LAUNCHES if products_agree(session, launch)), None)
    return RowPadding(launch, Rounding(spare=3)) if launch is not None else None


def padded(launch: Rounding | None) -> RowPadding | None:
    return RowPadding(launch, Rounding(spare=3)) if launch is not None else None


@pytest.mark.parametrize(
    ("differs", "launch"),
    [
        (lambda rows: None, Rounding()),
        (alone, Rounding(2)),
        (last_of_odd, Rounding(2, 2)),
        (from_size(512, -1), None),
        (from_size(64, 0), None),
        (lambda rows: 2 if rows == 3 else None, Rounding(2, 2)),
        (lambda rows: 1 if rows == 2 else None, None),
    ],
)
def test_the_cheapest_padding_with_which_all_sizes_agree(differs: Callable[[int], int | None], launch: Rounding) -> None:
    """A bit of one row, the first or the last, of one of the products would go unseen, and texts would change in company."""
    assert first_that_agrees(FakeSession(differs)) == padded(launch)


def measured_by(session: FakeSession) -> Callable[[], RowPadding | None]:
    return lambda: first_that_agrees(session)


@pytest.mark.parametrize("differs", [last_of_odd, from_size(512, 0)])
def test_a_machine_measures_once(tmp_path: Path, differs: Callable[[int], int | None]) -> None:
    """Every load would take as long as the first."""
    loaded, expected = FakeSession(), first_that_agrees(FakeSession(differs))
    assert cached_row_padding(KEY, measured_by(FakeSession(differs)), tmp_path) == expected
    assert cached_row_padding(KEY, measured_by(loaded), tmp_path) == expected
    assert loaded.launches == 0


@pytest.mark.parametrize("place", range(len(KEY)))
def test_another_machine_measures_again(tmp_path: Path, place: int) -> None:
    """A padding would be taken over by another processor, release, number of threads or model."""
    other = [*KEY[:place], "other", *KEY[place + 1 :]]
    cached_row_padding(KEY, measured_by(FakeSession()), tmp_path)
    assert cached_row_padding(other, measured_by(FakeSession(alone)), tmp_path) == padded(Rounding(2))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff{",
        b"{}",
        b'{"result": 2}',
        b'{"result": [[3, 1], [1, 1, 4]]}',
        b'{"result": "2"}',
    ],
)
def test_a_damaged_result_is_measured_again(tmp_path: Path, damage: bytes) -> None:
    """A file cut off by a full disk would stop every load, or choose a padding that was not measured."""
    cached_row_padding(KEY, measured_by(FakeSession(alone)), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert cached_row_padding(KEY, measured_by(FakeSession(alone)), tmp_path) == padded(Rounding(2))
    assert cached_row_padding(KEY, measured_by(FakeSession()), tmp_path) == padded(Rounding(2)), "the file was not repaired"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """In a container with a read-only home, bundles would not load."""
    (tmp_path / "file").touch()
    assert cached_row_padding(KEY, measured_by(FakeSession(alone)), tmp_path / "file" / "cache") == padded(Rounding(2))


class FakeModel:
    """Logits are the token's id and its position; in steps whose counts are ``odd`` the last bit differs."""

    def __init__(self, odd: list[int]) -> None:
        self.odd = odd

    def context(self, capacity: int, *, padding: RowPadding) -> Any:
        return SimpleNamespace(step=self.step, close=lambda: None)

    def step(self, first_index: int, counts: list[int], wanted: list[int]) -> Any:
        step = SimpleNamespace(input_ids=np.zeros(sum(counts), np.int64), logits=np.zeros((sum(counts), 2), np.float32))

        def place(cached: list[int]) -> None:
            step.logits[:, 0] = step.input_ids
            step.logits[:, 1] = [start + i for start, count in zip(cached, counts, strict=True) for i in range(count)]
            if counts == self.odd:
                step.logits[0, 1] = np.nextafter(step.logits[0, 1], np.float32(99))

        step.place, step.run_all = place, lambda graphs: None
        return step


@pytest.mark.parametrize(
    ("odd", "tokens", "agree"),
    [([], 12, True), ([12], 12, False), ([5], 12, False), ([1, 1], 12, False), ([3, 1], 12, False), ([72], 72, False)],
)
def test_launches_agree_bit_by_bit(odd: list[int], tokens: int, agree: bool) -> None:
    """Drafts would be verified with other logits than those of single tokens: in one launch, in a batch, or in an uneven one."""
    make_context: Any = partial(FakeModel(odd).context, padding=MIN_PADDING)
    assert launches_agree(make_context, [["uncut"]], 50, 100, tokens=tokens) == agree


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_texts_end_where_the_caches_do(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of few slots would not load: its caches would be full."""
    ends, step = list[int](), FakeModel.step

    def watched(self: FakeModel, first_index: int, counts: list[int], wanted: list[int]) -> Any:
        made = step(self, first_index, counts, wanted)
        place = made.place
        made.place = lambda cached: (ends.append(max(map(sum, zip(cached, counts, strict=True)))), place(cached))
        return made

    monkeypatch.setattr(FakeModel, "step", watched)
    make_context: Any = partial(FakeModel([]).context, padding=MIN_PADDING)
    assert launches_agree(make_context, [["uncut"]], 50, slots) and max(ends) == slots


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


@pytest.mark.parametrize(("block_size", "accuracy_level"), [(32, 4), (64, 4), (128, 4), (32, 1)])
def test_what_is_measured_holds_on_this_machine(block_size: int, accuracy_level: int) -> None:
    """Rows of other values than the measured ones would differ: the measurement would be too coarse."""
    session = product_session(block_size, accuracy_level, threads=1)
    launch = next(launch for launch in LAUNCHES if products_agree(session, launch))
    rows = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32) * 7
    together = session.run(None, {"x_256": rows})[0]
    for size in (1, 2, 3, 7, 9, 100, 255):
        found = session.run(None, {"x_256": np.resize(rows[:size], (launch.up(size), 256))})[0][:size]
        assert np.array_equal(found.view(np.uint32), together[:size].view(np.uint32)), size
    assert products_agree(product_session(block_size, accuracy_level, threads=2), launch)


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


@pytest.mark.parametrize("padding", PADDINGS)
def test_launches_are_padded_as_the_machine_needs(low_bit_bundle: Path, tmp_path: Path, padding: RowPadding) -> None:
    """What was measured would not reach the launches: a text would change with what shares them."""
    load(low_bit_bundle).close()
    (result,) = (tmp_path / "cache/row-padding").iterdir()
    result.write_text(json.dumps({"result": padding}))
    with load(low_bit_bundle) as engine:
        assert engine.bits_limitation is None and engine.backend.row_padding == padding
        context = engine.backend.context(2)
        for counts in ([1], [3], [1, 1], [2, 1]):
            step = context.step(0, counts, counts)
            assert len(step.input_ids) == len(step.logits) == padding.launch.up(sum(counts))


@pytest.mark.parametrize("policy", ["exact", "auto"])
def test_a_machine_on_which_nothing_helps_is_told(low_bit_bundle: Path, tmp_path: Path, policy: str, monkeypatch) -> None:
    """Texts would change in company, or under drafts, without a word."""
    monkeypatch.setattr(Manifest, "rounds", lambda *_: True)
    load(low_bit_bundle).close()
    (result,) = (tmp_path / "cache/row-padding").iterdir()
    result.write_text(json.dumps({"result": None}))
    with warnings.catch_warnings(record=True) as caught, load(low_bit_bundle, policy) as engine:
        (generation,) = engine.generate([[5, 6, 7]], GenerationParams(max_new_tokens=4))
        assert [str(w.message) for w in caught] == [engine.bits_limitation]
        assert "exact runs as full" in str(engine.bits_limitation) and "tide_same_bits 0" in engine.metrics()
    assert generation.stats.policy == "full"


def test_products_that_onnxruntime_refuses(low_bit_bundle: Path) -> None:
    """The user would see a traceback of ONNX Runtime's own exceptions."""
    manifest = json.loads((low_bit_bundle / "manifest.json").read_text())
    manifest["targets"]["cpu"]["products"] = manifest["tokenizer"]["file"]
    (low_bit_bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="cannot run tokenizer"):
        load(low_bit_bundle)
