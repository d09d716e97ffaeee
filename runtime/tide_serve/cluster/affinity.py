"""Routing by prefix: requests that begin alike go to the replica whose prefix cache holds that beginning.

Ray's own PrefixCacheAffinityRouter does not fit: it cannot be imported with the extra `ray[serve]` alone, blocks the event loop
for every request until an actor has answered, keeps the texts of prompts in that actor, and cannot route without it.

Ray copies the router's class with what it uses of this file, so what cannot be copied, such as context variables, is elsewhere.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tide_serve.cluster.forwarded import ForwardedRequest


class PrefixAffinityRouter(RequestRouter):
    """Chooses the preferred replica of a request's opening, unless it is busier than another by more than ``slack`` requests;
    then, and for requests without an opening, the less busy one of two random replicas.

    Rendezvous hashing gives the preferred replica: all ingresses agree without talking to each other, and when a replica joins or
    leaves, only the openings that it is preferred for go to another one.
    """

    def initialize_state(self, slack: int = 4) -> None:  # type: ignore[override]  # Ray documents named arguments
        """Called by Ray with the deployment's ``request_router_kwargs``."""
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas by rank; Ray takes the first rank of which one accepts the request, and calls again later when none does."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True  # without it Ray calls again at once, in a busy loop
        key = _opening(pending_request.args)
        if not key:
            return [two]
        preferred = max(candidate_replicas, key=lambda replica: weight(key, replica.replica_id.unique_id))
        least = min(self._ongoing(replica) for replica in candidate_replicas)
        return [two] if self._ongoing(preferred) > least + self._slack else [[preferred], two]

    def _ongoing(self, replica: RunningReplica) -> int:
        """Requests in progress on ``replica`` as this ingress last heard."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def weight(key: str, replica: str) -> bytes:
    """The weight in rendezvous hashing: the replica with the greatest one is preferred for ``key``."""
    return blake2b(f"{key} {replica}".encode(), digest_size=8).digest()


def _opening(args: list[Any]) -> str:
    return next((arg.opening for arg in args if isinstance(arg, ForwardedRequest)), "")
