"""Pages of metrics in the Prometheus text format, put together: of several engines, or of several processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_Values = defaultdict[tuple[str, tuple[tuple[str, str], ...]], float]  # by name and labels


def merged_pages(pages: Iterable[tuple[Mapping[str, str], str]], counts_only: bool = False) -> str:
    """One page of all ``pages``. Values of the same name and labels are added up.

    Args:
        pages: labels that each value of a page gets, and the page.
        counts_only: leave out gauges, which say what is now.
    """
    families: dict[str, Metric] = {}
    values = defaultdict[str, _Values](lambda: defaultdict(float))
    for labels, page in pages:
        for family in text_string_to_metric_families(page):
            if counts_only and family.type == "gauge":
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                values[family.name][sample.name, tuple({**sample.labels, **labels}.items())] += sample.value
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
    return generate_latest(_Families(families.values())).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
