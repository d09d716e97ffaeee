"""Compilation of a small kernel with real NVRTC, which needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tide_plugins.build.builder import Builder, content_key
from tide_plugins.build.compiler import why_not_built
from tide_plugins.build.nvrtc import CompilationError
from tide_plugins.kernels import KERNELS
from tide_runtime.bundle.architectures import ARCHITECTURES, Architecture
from tide_runtime.errors import TargetError

_KERNEL = replace(KERNELS[0], forms=("exit_router",), dtypes=("f32", "f16"))
_SOURCE = b"""
#include <cuda_fp16.h>
#include "factor.h"
template <typename T> __device__ void twice(T* x) {
  __shared__ T row[32];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[threadIdx.x ^ 1] * T(FACTOR);
}
extern "C" __global__ void tide_exit_router_f32(float* x) { twice(x); }
extern "C" __global__ void tide_exit_router_f16(__half* x) { twice(x); }
"""
_FILES = {"exit_router.cuh": _SOURCE, "factor.h": b"#define FACTOR 2\n"}


def _architecture(name: str) -> Architecture:
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cubins"


@pytest.mark.parametrize("name", ["sm_70", "sm_75", "sm_121"])
def test_a_cubin_holds_every_entry_point_with_its_resources(cache: Path, name: str) -> None:
    """Guards against compilers of CUDA 12 (sm_70) and 13 that conflict in one process."""
    built = Builder(cache, _FILES).build(_KERNEL, _architecture(name))
    assert built.image.content.startswith(b"\x7fELF")
    assert all(entry.encode() in built.image.content for entry in _KERNEL.entry_points)
    used = built.image.resources
    assert {name: found.shared_bytes for name, found in used.items()} == {"tide_exit_router_f32": 128, "tide_exit_router_f16": 64}
    assert all(found.registers > 0 and not found.spills for found in used.values())


def test_ptx_is_text_for_drivers_to_come(cache: Path) -> None:
    """Guards against missing PTX, which a GPU newer than every cubin needs."""
    built = Builder(cache, _FILES).build(_KERNEL, _architecture("compute_121"))
    assert b".target sm_121" in built.image.content and b".visible .entry tide_exit_router_f16" in built.image.content
    assert built.file_name == "exit_router.compute_121.ptx"


def test_the_second_build_comes_from_the_cache_bit_for_bit(cache: Path) -> None:
    """Guards against minutes of compilation at every start of a program."""
    first, second = (Builder(cache, _FILES).build(_KERNEL, _architecture("sm_75")) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert first.image == second.image


@pytest.mark.parametrize("changed", ["factor.h", "exit_router.cuh"])
def test_a_change_in_any_file_compiles_again(cache: Path, changed: str) -> None:
    """Guards against a stale cubin after an edit of a source or header."""
    before = Builder(cache, _FILES).build(_KERNEL, _architecture("sm_75"))
    files = _FILES | {changed: _FILES[changed].replace(b"FACTOR 2", b"FACTOR 4") + b"// changed\n"}
    after = Builder(cache, files).build(_KERNEL, _architecture("sm_75"))
    assert not after.cached
    assert (before.image.content != after.image.content) == (changed == "factor.h")


def test_a_compile_error_shows_the_compilers_words(cache: Path) -> None:
    """Guards against errors without file and line, and against caching them."""
    broken = _FILES | {"factor.h": b"#define FACTOR two\n"}
    with pytest.raises(CompilationError, match=r'(?s)exit_router.cuh.*identifier "two" is undefined'):
        Builder(cache, broken).build(_KERNEL, _architecture("sm_75"))
    assert not cache.exists()


def test_an_entry_point_that_is_missing_is_named(cache: Path) -> None:
    """Guards against 'named symbol not found' at launch."""
    with pytest.raises(TargetError, match=r"says .*tide_exit_router_bf16"):
        Builder(cache, _FILES).build(replace(_KERNEL, dtypes=("f32", "f16", "bf16")), _architecture("sm_75"))


def test_an_architecture_the_compiler_does_not_know_is_said_with_what_it_knows() -> None:
    """Guards against a failing `--arch all` where a compiler lacks an architecture."""
    reason = why_not_built(Architecture(61, 13, "GTX 10"))
    assert reason is not None and "does not compile for sm_61; it knows sm_75" in reason
    assert all(why_not_built(architecture) is None for architecture in ARCHITECTURES)


def test_keys_differ_where_the_parts_do() -> None:
    """Guards against equal keys of different sources, such as 'ab','c' and 'a','bc'."""
    assert len({content_key(parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), (b"abc", ""))}) == 4
    assert content_key(["ab", "c"]) == content_key([b"ab", b"c"])
