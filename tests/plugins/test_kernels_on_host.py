"""The CUDA kernels' source, compiled for the host and compared with NumPy in float64."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plugins.host_driver import SANITIZE, SHIM, HostDriver, host_library, on_host, run_case
from tide_plugins.conformance import Case, CaseSpec, cases
from tide_plugins.conformance.case import ELEMENTS
from tide_plugins.kernels import CSRC, KERNELS
from tide_plugins.launch.draft_verify import prepare_draft_verify
from tide_plugins.params import PARAMS
from tide_plugins.reference import philox_4x32_10

SPECS = {spec.name: spec for spec in cases()}
PER_KERNEL = 9  # cases that also run in other execution orders


def some(kernel: str, count: int) -> list[CaseSpec]:
    """``count`` evenly spaced cases of a kernel."""
    of_kernel = [spec for spec in SPECS.values() if spec.kernel == kernel]
    return of_kernel[:: max(1, len(of_kernel) // count)]


ORDERED = [spec for kernel in KERNELS for spec in some(kernel.name, PER_KERNEL)]
SANITIZED = [spec for spec in ORDERED if not any(f"-h{hidden}-" in spec.name for hidden in (4096, 4097, 8192))]


def test_there_are_as_many_cases_as_promised() -> None:
    """Guards against an empty list of cases."""
    assert len(SPECS) >= 300
    assert set(Counter(spec.kernel for spec in SPECS.values())) == {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize(("place", "name"), enumerate(SPECS), ids=SPECS)
def test_kernel_equals_the_float64_reference(place: int, name: str) -> None:
    """Guards against wrong scores, flags, row lists or tokens."""
    case = SPECS[name].build()
    case.check(run_case(case, HostDriver(order=place % 4)))


@pytest.mark.parametrize("spec", ORDERED, ids=lambda spec: spec.name)
def test_no_order_of_threads_and_blocks_changes_a_bit(spec: CaseSpec) -> None:
    """Guards against results that depend on execution order, such as by a missing barrier."""
    expected = _bits(run_case(spec.build(), HostDriver(order=0)))
    for order in (1, 2, 3):
        assert _bits(run_case(spec.build(), HostDriver(order=order))) == expected


def _bits(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("sm_count", [1, 20, 132])
@pytest.mark.parametrize("spec", some("exit_router", 8) + some("exit_translate", 4), ids=lambda spec: spec.name)
def test_every_split_of_the_hidden_size_is_right(spec: CaseSpec, sm_count: int) -> None:
    """Guards against errors in splits of H that only some GPUs use."""
    case = spec.build()
    case.check(run_case(case, HostDriver(sm_count=sm_count)))


TILED = [
    spec
    for spec in SPECS.values()
    if spec.kernel == "exit_router"
    and any(part in spec.name for part in ("-n129-h7-", "-n130-h320-r17-", "-n130-h320-r256-", "-n257-h111-", "-live129"))
]


@pytest.mark.parametrize(("tensor_cores", "sm_count"), [(80, 132), (70, 6), (70, 132), (0, 6), (0, 132)])
def test_tiles_of_both_sizes_are_right_with_every_instruction_set(tensor_cores: int, sm_count: int) -> None:
    """Guards against wrong scores in prefill on some GPUs only, and against tensor core accesses that the PTX ISA forbids.

    Rows of `ldmatrix` are aligned to 16 bytes, rows of `wmma` (V100) to 32.

    With 132 multiprocessors the tiles have 32 rows, with 6 they have 128.
    """
    driver = HostDriver(order=2, sm_count=sm_count, library=host_library(tensor_cores=tensor_cores))
    for spec in TILED:
        case = spec.build()
        case.check(run_case(case, driver))


@pytest.mark.parametrize("rows", [5, 129])
def test_a_launch_can_be_replayed(rows: int) -> None:
    """Guards against counters that do not return to zero, which break the second launch of a captured graph."""
    [spec] = [s for s in SPECS.values() if s.name.startswith(f"exit_router-f32-n{rows}-h33-")]
    case, driver = spec.build(), HostDriver(order=2)
    launch = case.prepare(driver.kernels(), stream=0, **case.numbers, **{n: on_host(t) for n, t in case.tensors.items()})
    for _ in range(3):
        for name in ("score", "exits", "exit_rows", "continue_rows", "exit_count", "continue_count", "verdict"):
            case.tensors[name][...] = 77
        launch.enqueue(0)
        case.check(case.tensors)


def test_router_sets_the_graph_condition_to_its_verdict() -> None:
    """Guards against a wrong condition of the IF node around the deeper segment."""
    driver = HostDriver()
    for threshold, verdict in ((0.0, 0), (1.5, 2)):
        case = SPECS[
            next(name for name in SPECS if f"exit_router-f32-n33-h256-r32-rms-pad0-offset0-threshold{threshold}" in name)
        ]
        built = case.build()
        driver.graph_condition()
        run_case(built, driver, graph_condition=1234)
        assert driver.graph_condition() == (1234, verdict, 1)
        run_case(case.build(), driver)
        assert driver.graph_condition() == (0, 0, 0), "no handle was given"


def test_verification_sets_the_graph_condition_to_the_running_rows() -> None:
    """Guards against a WHILE node that stops too early or never."""
    driver, case = HostDriver(), SPECS["draft_verify-greedy-b16-d4-agreement0.7-eos1-started"].build()
    driver.graph_condition()
    tensors = run_case(case, driver, graph_condition=99)
    assert 0 < tensors["running"][0] < 16
    assert driver.graph_condition() == (99, int(tensors["running"][0]), 1)


@pytest.mark.parametrize("certain", [False, True])
def test_speculative_sampling_leaves_the_distribution_alone(certain: bool) -> None:
    """Guards against drafts that bias the tokens' distribution: chi-square test over 8,000 rows of the same step."""
    rng, rows = np.random.default_rng(7), 8_000
    p, q = np.array([0.05, 0.4, 0.0, 0.25, 0.3], np.float32), np.array([0.5, 0.1, 0.1, 0.2, 0.1], np.float32)
    drafts = np.full((rows, 1), 3) if certain else rng.choice(5, (rows, 1), p=q / q.sum())
    tensors = {
        "drafts": drafts.astype(np.int64),
        "draft_count": np.ones(rows, np.int32),
        "probabilities": np.broadcast_to(p, (rows, 2, 5)).copy(),
        "seed": rng.integers(0, 2**64, rows, np.uint64),
        "limit": np.full(rows, 1000),
        "length": np.full(rows, 10),
        "last_token": np.zeros(rows, np.int64),
        "finished": np.zeros(rows, np.uint8),
        "tokens": np.zeros((rows, 2), np.int64),
        **{name: np.zeros(rows, np.int32) for name in ("accepted", "emitted")},
        "running": np.zeros(1, np.int32),
    }
    if not certain:
        tensors["proposals"] = np.broadcast_to(q, (rows, 1, 5)).copy()
    out = run_case(Case(prepare_draft_verify, tensors, {}, lambda _: None), HostDriver())
    second = out["tokens"][out["accepted"] == 1, 1]
    for tokens in (out["tokens"][:, 0], second):
        counts, expected = np.bincount(tokens, minlength=5), p / p.sum() * len(tokens)
        assert counts[2] == 0, "a token of probability 0"
        assert ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum() < 16.3  # 3 degrees of freedom, p = 0.001


def test_random_numbers_are_philox() -> None:
    """Guards against deviations from Philox; known answers are Random123's kat_vectors."""
    known = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    library = ctypes.CDLL(str(host_library()))
    for counter, key, words in known:
        drawn = (ctypes.c_uint32 * 4)()
        library.tide_philox((ctypes.c_uint32 * 4)(*counter), ctypes.c_uint64(key), drawn)
        assert tuple(drawn) == philox_4x32_10(counter, key) == words


@pytest.mark.parametrize("kernel", PARAMS)
def test_python_structs_are_laid_out_as_the_compilers(kernel: str, tmp_path: Path) -> None:
    """Guards against struct fields at other offsets than the compiler's."""
    fields = [name for name, *_ in PARAMS[kernel]._fields_]
    offsets = ", ".join(f"offsetof(tide::{kernel}_params, {name})" for name in fields)
    source = tmp_path / "layout.cpp"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{kernel}_plan.h"\n'
        f"const std::size_t layout[] = {{{offsets}, sizeof(tide::{kernel}_params)}};\n"
        'int main() { for (std::size_t at : layout) std::printf("%zu ", at); }'
    )
    subprocess.run(["g++", "-std=c++17", f"-I{CSRC}", str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    expected = [*(getattr(PARAMS[kernel], name).offset for name in fields), ctypes.sizeof(PARAMS[kernel])]
    assert [int(number) for number in printed.split()] == expected


def test_shim_rounds_as_ieee_754(tmp_path: Path) -> None:
    """Guards against host results in half precision with another rounding than the GPU's."""
    values = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate(
        [values[np.isfinite(values)], np.array([65519.99, 65520, 6e-8, 2.98e-8, 1 + 2**-11, 1 + 2**-8], np.float32)]
    )
    (tmp_path / "values").write_bytes(values.tobytes())
    source = tmp_path / "round.cpp"
    source.write_text(
        '#include <cstdio>\n#include "cuda_bf16.h"\n#include "cuda_fp16.h"\n'
        "int main() { float x; while (std::fread(&x, 4, 1, stdin)) { const __half h = __float2half_rn(x);\n"
        "const __nv_bfloat16 b = __float2bfloat16_rn(x); std::fwrite(&h, 2, 1, stdout); std::fwrite(&b, 2, 1, stdout); } }"
    )
    subprocess.run(["g++", "-std=c++17", f"-I{SHIM}", str(source), "-o", str(tmp_path / "round")], check=True)
    with (tmp_path / "values").open("rb") as given:
        rounded = subprocess.run([str(tmp_path / "round")], stdin=given, capture_output=True, check=True).stdout
    pairs = np.frombuffer(rounded, np.uint16).reshape(-1, 2)
    for column, dtype in enumerate(("f16", "bf16")):
        with np.errstate(over="ignore"):
            assert np.array_equal(pairs[:, column], values.astype(ELEMENTS[dtype]).view(np.uint16))


_SANITIZED = """
from plugins.host_driver import SANITIZE, HostDriver, host_library, run_case
from plugins.test_kernels_on_host import SANITIZED, TILED
for specs, sm_count in ((SANITIZED, 6), (TILED, 132)):
    driver = HostDriver(order=2, sm_count=sm_count, library=host_library(*SANITIZE))
    for spec in specs:
        case = spec.build()
        case.check(run_case(case, driver))
print("clean")
"""


def test_sanitizers_find_nothing() -> None:
    """Guards against out-of-bounds reads of rows or shared memory, which a GPU may not report."""
    library = host_library(*SANITIZE)
    assert library.exists()
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", _SANITIZED], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "clean" in result.stdout, result.stdout + result.stderr[-4000:]
