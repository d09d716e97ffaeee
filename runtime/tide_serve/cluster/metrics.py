"""The replicas' metrics as one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def by_replica(pages: Iterable[tuple[str, str]]) -> str:
    """The metrics of all replicas in the Prometheus text format, each with its ``replica`` as a label.

    Args:
        pages: a replica's name, and its metrics in the same format.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
