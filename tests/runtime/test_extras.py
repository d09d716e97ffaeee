"""What `pip install 'tide-llm[…]'` brings."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extra_cuda_installs_every_library_of_the_provider() -> None:
    """Guards against `pip install 'tide-llm[cuda]'` that runs only where torch or a system CUDA brings the libraries."""
    extras = PROJECT["optional-dependencies"]
    installed = [requirement.split(">")[0] for requirement in [*extras["cuda"], *extras["kernels"]]]
    libraries = {"nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu13"}
    assert libraries <= set(installed)
