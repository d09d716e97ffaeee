"""Which replica a request is sent to."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tide_serve.cluster.affinity import PrefixAffinityRouter
from tide_serve.cluster.forwarded import ForwardedRequest

REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"replica{i}")) for i in range(4)]
OPENINGS = [f"opening {i}" for i in range(200)]


class _Router(PrefixAffinityRouter):
    """Without Ray's own parts."""

    def __init__(self, ongoing: dict[str, int], slack: int = 4) -> None:
        self._lengths = ongoing
        self.initialize_state(slack=slack)

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda replica_id: self._lengths.get(replica_id.unique_id))


def _ranks(opening: str, replicas=REPLICAS, ongoing: dict[str, int] | None = None) -> list[list[str]]:
    pending = SimpleNamespace(args=[ForwardedRequest({}, b"", opening)], routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(_Router(ongoing or {}).choose_replicas(replicas, pending))
    assert pending.routing_context.should_backoff, "Ray would ask again in a busy loop while all replicas are full"
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


def _preferred(opening: str, replicas=REPLICAS) -> str:
    return _ranks(opening, replicas)[0][0]


def test_one_opening_one_replica():
    """Breaks: a conversation's prefix cache is on another replica than its next turn; or one replica gets them all."""
    chosen = Counter(_preferred(opening) for opening in OPENINGS)
    assert all(_preferred(opening) == _preferred(opening, REPLICAS[::-1]) for opening in OPENINGS)
    assert len(chosen) == 4 and min(chosen.values()) > 25


def test_only_openings_of_a_lost_replica_move():
    """Breaks: the prefix caches of all replicas are worth nothing after one is added or lost."""
    before = {opening: _preferred(opening) for opening in OPENINGS}
    after = {opening: _preferred(opening, REPLICAS[:3]) for opening in OPENINGS}
    assert all(after[opening] == replica for opening, replica in before.items() if replica != "replica3")


@pytest.mark.parametrize(("busier_by", "is_preferred"), [(4, True), (5, False)])
def test_busy_replica_is_passed_over(busier_by, is_preferred):
    """Breaks: users with one prompt queue at one replica while others are idle."""
    preferred = _preferred("a")
    others = {replica.replica_id.unique_id: 1 for replica in REPLICAS}
    ranks = _ranks("a", ongoing={**others, preferred: 1 + busier_by})
    assert (ranks[0] == [preferred]) == is_preferred
    assert len(ranks[-1]) == 2  # of which Ray takes the less busy one


def test_requests_without_an_opening_spread():
    """Breaks: /v1/models and the like all go to one replica."""
    assert len({name for _ in range(100) for name in _ranks("")[0]}) == 4
    assert asyncio.run(_Router({}).choose_replicas(REPLICAS[:1], None)) == [REPLICAS[:1]]
