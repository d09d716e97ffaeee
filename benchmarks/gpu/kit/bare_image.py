"""A rented GPU machine's Python: these packages, this repository beside them without an installation, and no registry.

A dry run hides every other package that happens to be installed, so that a missing one is found without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".", "runtime", "calibrate", "plugins", "bench")  # of this repository's packages
_SIMULATIONS = "tests"  # a dry run assembles graphs on the tests' simulated GPU
OWN = frozenset({"benchmarks", "tide_runtime", "tide_serve", "tide_calibrate", "tide_plugins", "tide_bench", "tide_export"})
_OF_TESTS = frozenset({"runtime", "plugins"})

# The packages of the image on which the kit has to run, as its list of 2026-11-17 names them.
_LIST = """
absl-py accelerate aiofiles aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs botorch build certifi
charset-normalizer chex click cloudpickle cmake colorama contourpy coverage cuda-bindings cuda-core cuda-pathfinder
cuda-toolkit cupy-cuda13x cycler cython diffrax e3nn einops equinox etils execnet filelock flatbuffers flax fonttools
formulaic frozenlist fsspec gpytorch grpcio h11 h5py hf-xet httpcore httpx huggingface-hub humanize hypothesis idna imageio
iniconfig interface-meta jax jax-cuda13-pjrt jax-cuda13-plugin jaxlib jaxtyping jinja2 joblib kiwisolver lazy-loader
lightning lightning-utilities linear-operator lineax llvmlite lxml markdown markdown-it-py markupsafe matplotlib mdurl meson
ml-dtypes mpi4py mpmath msgpack multidict multipledispatch mypy-extensions nanobind narwhals networkx ninja numba numba-cuda
numpy numpyro nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft
nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-ml-py nvidia-nccl-cu13
nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx onnx onnx-ir onnxruntime onnxscript opencv-python-headless optax opt-einsum
opt-einsum-fx optimistix orbax-checkpoint packaging pandas pathspec patsy peft pillow pip pluggy portalocker prometheus-client
propcache protobuf psutil pyarrow pybind11 py-cpuinfo pygments pyparsing pyproject-hooks pyre-extensions pytest
pytest-benchmark pytest-cov pytest-mock pytest-timeout pytest-xdist python-dateutil pytorch-lightning pyyaml regex requests
rich sacrebleu safetensors scikit-build-core scikit-image scikit-learn scipy seaborn sentencepiece sentence-transformers
setuptools shellingham simplejson six sortedcontainers statsmodels sympy tabulate tensorboard tensorboard-data-server
tensorstore threadpoolctl tifffile tiktoken timm tokenizers toolz torch torchaudio torchdiffeq torch-geometric torchmetrics
torchvision tqdm transformers treescope triton typer typing-extensions typing-inspect urllib3 uvloop wadler-lindig werkzeug
wheel wrapt xarray xxhash yarl zipp
"""
PACKAGES = frozenset(_LIST.split())


def make_importable(work: Path) -> None:
    """Put this repository before everything else on ``sys.path``, here and in child processes.

    ``work``: a folder for the package's metadata, without which its entry points, the loop kernels among them, are not found.
    """
    places = [*(str(ROOT / folder) for folder in FOLDERS), str(_metadata(work))]
    sys.path[:] = [*places, *(place for place in sys.path if place not in places)]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *(place for place in before if place and place not in places)])


def _metadata(work: Path) -> Path:
    """A folder with what ``pip install`` would leave of pyproject.toml: name, version, entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = work / "metadata" / f"tide_llm-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return folder.parent.resolve()


def hide_other_packages() -> None:
    """From here on, only the image's packages, the standard library and this repository can be imported."""
    sys.path.append(str(ROOT / _SIMULATIONS))
    finders = [finder for finder in sys.meta_path if finder is not PathFinder and "editable" not in str(finder).lower()]
    sys.meta_path[:] = [*finders, _ImageFinder]  # type: ignore[list-item]


class _ImageFinder:
    """`PathFinder`, blind to packages that the image lacks."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if path is not None or in_image(name) else None

    @classmethod
    def find_distributions(cls, *arguments: object, **options: object) -> object:
        return PathFinder.find_distributions(*arguments, **options)  # type: ignore[arg-type]

    @classmethod
    def invalidate_caches(cls) -> None:
        PathFinder.invalidate_caches()


def in_image(module: str) -> bool:
    """Whether a top-level ``module`` can be imported on the image; one that no package owns is part of an extension."""
    if module in sys.stdlib_module_names or module in OWN | _OF_TESTS or module == "__main__":
        return True
    owners = _owners().get(module)
    return owners is None or not _allowed().isdisjoint(owners)


@cache
def _owners() -> dict[str, set[str]]:
    """Top-level module → the installed packages that provide it."""
    return {module: {_plain(name) for name in names} for module, names in packages_distributions().items()}


@cache
def _allowed() -> frozenset[str]:
    """`PACKAGES`, and what these need as they are installed here, perhaps in other versions."""
    needed, waiting = set(PACKAGES), list(PACKAGES)
    while waiting:
        try:
            lines = requires(waiting.pop()) or []
        except PackageNotFoundError:
            continue
        further = {_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines if "extra ==" not in line} - needed
        needed |= further
        waiting += further
    return frozenset(needed)


def _plain(name: str) -> str:
    """The package's name as `PACKAGES` spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()
