"""deploy/grafana/tide-serve.json beside what the server says at /metrics."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
from tide_serve.models.pool_metrics import PoolMetrics
from tide_serve.observe.request_record import ServerMetrics

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "tide-serve.json"
PARTS = ("_bucket", "_sum", "_count")  # of a histogram


def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def _expressions() -> list[str]:
    dashboard = _dashboard()
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return panels + [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]


def _kinds(http: httpx.Client) -> dict[str, str]:
    """Metric → counter or gauge; the parts of a histogram are counters."""
    pages = http.get("/metrics").text + PoolMetrics().text({})  # the second: of a server with several models
    found = dict(re.findall(r"^# TYPE (\w+) (\w+)$", pages, re.MULTILINE))
    parts = {f"{name}{part}": "counter" for name, kind in found.items() if kind == "histogram" for part in PARTS}
    return {name: kind for name, kind in found.items() if kind != "histogram"} | parts


def test_every_metric_of_the_dashboard_is_one_of_the_servers(http: httpx.Client) -> None:
    """Breaks: a panel stays empty because a metric was renamed, or shows the rate of what is no counter; models that push each
    other out of the memory, or a disk full of damaged prefixes, are not seen."""
    kinds, used = _kinds(http), set[str]()
    for expression in _expressions():
        names = re.findall(r"\b(?:tide|process)_\w+", expression)
        assert names, expression
        for name in names:
            assert name in kinds, f"{name} in {expression}"
            assert (f"rate({name}" in expression) == (kinds[name] == "counter"), expression
        used |= set(names)
    assert len(used) > 20
    swaps = {name for name in kinds if name.startswith(("tide_model_", "tide_prefix_disk_")) and not name.endswith("_created")}
    assert len(swaps) == 9 and swaps <= used


def test_there_are_instances_to_choose_while_no_model_is_loaded() -> None:
    """Breaks: a server whose models are all unloaded shows nothing, not even its memory."""
    own = ServerMetrics().text()
    variables = [one["definition"] for one in _dashboard()["templating"]["list"] if "definition" in one]
    metrics = [name for definition in variables for name in re.findall(r"\btide_\w+", definition)]
    assert len(metrics) == 2 and all(f"\n{name} " in own for name in metrics)
