"""`benchmarks.gpu_reach`: code for GPUs that nothing reaches is found, and there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_reach

_SCRIPTS = '[project.scripts]\ntide = "tide_runtime.cli:main"\n[project.entry-points.plugins]\nloop = "tide_plugins.loop:load"\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of five modules, three kernels and a check."""
    files = {
        "pyproject.toml": _SCRIPTS,
        "Makefile": "check:\n\tpython -m benchmarks.gpu.kit\n",
        "README.md": "",
        "plugins/README.md": "",
        "runtime/tide_runtime/cli.py": "from tide_runtime.device_loop import loop\n\n\ndef main():\n    loop.Loop().run()\n",
        "runtime/tide_runtime/device_loop/loop.py": (
            "class Loop:\n    def run(self):\n        return 1\n\n    def unused(self):\n        return 2\n"
        ),
        "plugins/tide_plugins/__main__.py": "",
        "plugins/tide_plugins/loop.py": "from tide_plugins.launch import call\n\n\ndef load():\n    return call('used')\n",
        "plugins/tide_plugins/launch.py": "def call(name):\n    return name\n\n\ndef forgotten():\n    return call('lost')\n",
        "plugins/tide_plugins/conformance/cases.py": "def cases():\n    return []\n",
        "plugins/tide_plugins/csrc/used.cuh": '#include "sum.cuh"\n',
        "plugins/tide_plugins/csrc/sum.cuh": "int sum;\n",
        "plugins/tide_plugins/csrc/lost.cuh": "int lost;\n",
        "benchmarks/gpu/kit.py": "from tide_plugins.conformance.cases import cases\n\n\ndef main():\n    return cases()\n",
        "benchmarks/gpu/old.py": "from tide_plugins.launch import forgotten\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_nothing_reaches_is_found(tree: Path) -> None:
    """Guards against a figure that is 0 because the walk reaches everything."""
    found = {row.path: (row.commands, row.checked, row.unreached) for row in gpu_reach.reach(tree)}
    assert found == {
        "runtime/tide_runtime/device_loop/loop.py": (4, 0, 2),
        "plugins/tide_plugins/__main__.py": (0, 0, 0),
        "plugins/tide_plugins/loop.py": (5, 0, 0),
        "plugins/tide_plugins/launch.py": (4, 0, 2),
        "plugins/tide_plugins/conformance/cases.py": (0, 2, 0),
        "plugins/tide_plugins/csrc/used.cuh": (1, 0, 0),
        "plugins/tide_plugins/csrc/sum.cuh": (1, 0, 0),
        "plugins/tide_plugins/csrc/lost.cuh": (0, 0, 1),
        "benchmarks/gpu/kit.py": (0, 5, 0),
        "benchmarks/gpu/old.py": (0, 0, 1),
    }


def test_everything_for_gpus_is_reached() -> None:
    """Guards against kernels, launches and benchmarks that only tests run."""
    assert {row.path: row.unreached for row in gpu_reach.reach(gpu_reach.ROOT) if row.unreached} == {}
