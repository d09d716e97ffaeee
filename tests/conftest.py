"""How tests are shared out among processes (`pytest -n`): together, when they share something that takes long to make."""

from __future__ import annotations

import pytest

pytest_plugins = ["left_running"]


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook (not under pytest 9, which keeps node ids elsewhere)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An architecture is exported once for all tests that are given its name; other tests stay with their file."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        architecture = parameters.get("name") if "exported" in getattr(item, "fixturenames", ()) else None
        item.add_marker(pytest.mark.xdist_group(str(architecture or item.path)))
