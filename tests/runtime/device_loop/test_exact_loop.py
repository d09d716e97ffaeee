"""A loop of drafts and verifications on a simulated GPU gives the texts of `full`, for changing batches and every driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runtime.device_loop.test_decode_loop import EXIT, MODEL, WINDOW, Driven, _broken
from runtime.device_loop.test_plugin_kernels import SimulatedDriver
from runtime.numpy_backend import tiny_manifest
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import FP64, TinyDeviceBackend
from runtime.tiny_generation import Request, make_row, output
from runtime.tiny_transformer import TinyTransformer
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_runtime.backends.device.element_types import FP32, ElementType
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DevicePlan
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.errors import NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence
from tide_runtime.text.grammar import Grammar
from tide_runtime.text.thoughts import ThoughtMarks, Thoughts

LONG = TinyTransformer(3, (0.5, 0.5, 0.4, 0.6), vocab=11, positions=200)
REPEATING = [(1, 2, 3) * n + (1,) * (n % 3) for n in range(2, 10)]
RANDOM = [tuple(np.random.default_rng(n).integers(0, 11, 3 + 2 * n).tolist()) for n in range(8)]
TURNS = 5


class Exact:
    """Runs requests through the loop. ``real``: with the CUDA kernels, compiled here. ``price``: of a further token."""

    def __init__(
        self,
        model: TinyTransformer = LONG,
        compile: bool = True,
        real: bool = False,
        logits: ElementType = FP64,
        price: float = 0.01,
        **backend: Any,
    ) -> None:
        self.gpu, self.manifest = SimulatedGpu(), tiny_manifest(model, [1, 3])
        self.backend = TinyDeviceBackend(self.manifest, model, self.gpu, logits=logits, **backend)
        self.drivers = Drivers(HostDriver(self.gpu).compile, GraphDriver(self.gpu).compile if compile else None)
        plan = ExactDepth(self.manifest, DepthOptions(draft="ngram")).device_plan()
        assert isinstance(plan, DevicePlan) and plan.drafts is not None
        cheap = replace(plan, drafts=replace(plan.drafts, pass_ms=lambda _, tokens: 1 + price * tokens))
        kernels: Any = NumpyLoopKernels(self.gpu)
        if real:
            driver = SimulatedDriver(3)
            driver.gpu = self.gpu
            kernels = PluginLoopKernels(driver.kernels(), self.gpu.stream)
        self.policy = DeviceLoopPolicy(cheap, kernels, TURNS, self.drivers)

    def rows(self, requests: list[Request], capacity: int, policy: Any = None) -> list[TokenSequence]:
        rows = [make_row(request, self.manifest) for request in requests]
        for _ in run(policy or self.policy, self.backend.context(capacity), rows):  # type: ignore[arg-type]
            pass
        return rows

    def texts(self, requests: list[Request], capacity: int) -> list[Any]:
        return [output(row) for row in self.rows(requests, capacity)]

    def expected(self, requests: list[Request]) -> list[Any]:
        """Texts of `full`, each alone."""
        return [output(row) for request in requests for row in self.rows([request], 1, FullDepth())]


def requests(prompts: list[tuple[int, ...]], new: int = 60, eos: tuple[int, ...] = (), temperature: float = 0.0) -> list[Request]:
    """Every other request is sampled at ``temperature``."""
    made = list[Request]()
    for seat, prompt in enumerate(prompts):
        sampling: dict[str, Any] = {"temperature": temperature * (seat % 2), "top_p": 1 - 0.2 * (seat % 4 // 2), "seed": seat}
        params = GenerationParams(max_new_tokens=new - 7 * (seat % 3), eos_token_ids=eos, **sampling)
        made.append(Request(prompt, params, seat))
    return made


@pytest.mark.parametrize("capacity", [1, 3, 8])
@pytest.mark.parametrize("prompts", [REPEATING, RANDOM], ids=["repeating", "random"])
def test_the_texts_are_those_of_full(prompts: list[tuple[int, ...]], capacity: int) -> None:
    """Guards against drafts that are taken for the model's tokens, and rows that get another's."""
    exact = Exact()
    for wanted in (requests(prompts), requests(prompts, eos=(4,)), requests(prompts, temperature=0.3)):
        assert exact.texts(wanted, capacity) == exact.expected(wanted)
    assert exact.gpu.graph_launches > 0 and exact.drivers.execution is not None and exact.drivers.execution.refusal is None


@pytest.mark.parametrize(
    "kind",
    [
        {"compile": False},
        {"fixed_stream": True},
        {"queued_beside": "memory"},
        {"min_slots": 25},
        {"model": MODEL},
        {"real": True, "logits": FP32},
        {"real": True, "logits": FP32, "compile": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:captured nodes of type")
def test_every_drive_generates_the_same_texts(kind: dict[str, Any]) -> None:
    """Guards against texts that depend on the driver, the graph's form, where caches begin or how soon they are full, and against
    CUDA kernels that differ from those of the other tests."""
    exact, model = Exact(**kind), kind.get("model", LONG)
    prompts = [prompt[: model.positions // 2] for prompt in (*REPEATING[:3], *RANDOM[:2])]
    for wanted in (requests(prompts, 60 if model is LONG else 99), requests(prompts, eos=(4,), temperature=0.3)):
        assert exact.texts(wanted, 3) == exact.expected(wanted)


def test_rows_near_their_last_slot_get_the_drafts_that_fit() -> None:
    """Guards against a pass over more slots than a row has left, whose tokens get other positions."""
    [one] = requests([(1,)], 199)
    wanted = [replace(one, prompt=((1, 2, 3) * 60)[:count]) for count in range(110, 150)]
    for exact in (Exact(price=0.0), Exact(price=0.0, real=True, logits=FP32)):
        assert exact.texts(wanted, 1) == exact.expected(wanted)


def test_a_launch_verifies_several_drafts_of_each_row() -> None:
    """Guards against a loop that drafts nothing, a round trip to the host for each pass, and statistics without drafts."""
    exact = Exact()
    rows = exact.rows(requests(REPEATING, 100), 8)
    accepted, tokens = sum(row.depth.accepted["ngram"] for row in rows), sum(row.num_tokens - row.prompt_tokens for row in rows)
    passes = exact.backend.launches["segment_0"]
    assert accepted > tokens // 3 and passes < tokens // 8 and exact.gpu.graph_launches < passes
    assert all(len(row.depth.token_depths) == row.num_tokens - row.prompt_tokens - 1 for row in rows)


def test_passes_have_as_many_drafts_as_pay() -> None:
    """Guards against passes of 16 tokens where they take long, or where a text's copies were wrong before."""
    shares = []
    for price in (0.01, 0.1, 0.4):
        rows = Exact(price=price).rows(requests(RANDOM, 100), 8)
        drafted, accepted = (sum(getattr(row.depth, name)["ngram"] for row in rows) for name in ("drafted", "accepted"))
        shares.append(accepted / drafted)
    assert shares == sorted(shares) and shares[-1] > 4 * shares[0]


def test_a_row_follows_the_host_where_it_was_decoded_there() -> None:
    """Guards against drafts from a text that the device has not got, after steps that a waiting request made the host's."""
    exact = Exact()
    penalised = GenerationParams(max_new_tokens=9, repetition_penalty=1.1)
    wanted = [*requests(REPEATING[:2], 90), Request(RANDOM[0], penalised, 2)]
    assert exact.texts(wanted, 3) == exact.expected(wanted)
    assert exact.gpu.graph_launches


ENDS = {"eos_token_ids": tuple(range(8))}
TAKEN: list[dict[str, Any]] = [{"temperature": 0.7}, {"stop": ("a",)}, {"ignore_eos": True, **ENDS}]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        *((change, True) for change in TAKEN),
        *(({name: 0.5}, False) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "depth_budget")),
        *((change, False) for change in ({"logit_bias": ((3, 9.0),)}, {"logprobs": 1}, {"grammar": Grammar.regex("x")}, ENDS)),
        ({"thoughts": Thoughts(ThoughtMarks("<t>", "</t>"), budget=3)}, False),
    ],
    ids=str,
)
def test_a_loop_takes_no_row_that_needs_the_host(change: dict[str, Any], taken: bool) -> None:
    """Guards against penalties, biases, grammars, log-probabilities, budgets and end tokens that the device leaves out for one of
    its rows, and against rows that wait for the host without need."""
    exact = Exact()
    rows = [make_row(Request((1, 2), GenerationParams(**one), seat), exact.manifest) for seat, one in enumerate(({}, change))]
    for seat, row in enumerate(rows):
        row.batch_index = seat
    assert exact.policy._is_eligible(exact.backend.context(2), rows) == taken
    for count in (8, 9):  # end tokens, of which the device has room for 8
        rows[0].eos = frozenset(range(count))
        assert exact.policy._is_eligible(exact.backend.context(2), rows[:1]) == (count == 8)


@pytest.mark.parametrize(("driven", "spare"), [(Exact(), 16), (Driven(), 0), (Driven((EXIT,)), TURNS + WINDOW)])
def test_a_loop_takes_rows_up_to_their_last_slot(driven: Any, spare: int) -> None:
    """Guards against passes and padding that are written behind a row's slots, and rows that the host decodes long before."""
    context = driven.backend.context(1)
    [row] = [make_row(Request((1,), GenerationParams(), 0), driven.manifest)]
    found = []
    for row.batch_index, row.num_cached_tokens in (
        (0, context.caches.limit - spare + 1),
        (0, context.caches.limit - spare),
        (1, 0),
    ):
        found.append(driven.policy._is_eligible(context, [row]))
    assert found == [False, True, False]  # the last one has a prompt's row before it
    driven.policy.plan = replace(driven.policy.plan, can_start=lambda sequence: False)
    row.batch_index = 0
    assert not driven.policy._is_eligible(context, [row])


@pytest.mark.parametrize("compile", [False, True])
def test_non_finite_logits_raise(compile: bool) -> None:
    """Guards against a loop that goes on with token -1, never returns, or waits for the other rows."""
    exact = Exact(MODEL, compile)
    object.__setattr__(exact.backend, "model", _broken(MODEL))
    with pytest.raises(NumericsError, match="NaN"):
        exact.texts(requests([(1, 2, 3), (4, 5)], 20), 2)
