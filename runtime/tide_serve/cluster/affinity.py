"""Routing by prefix: requests that begin alike go to the replica whose prefix cache holds that beginning.

Ray's own PrefixCacheAffinityRouter does not fit: it cannot be imported with the extra `ray[serve]` alone, blocks the event loop
for every request until an actor has answered, keeps the texts of prompts in that actor, and cannot route without it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Scope

from tide_serve.observe.request_record import current_record


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


OPENING_CHARS = 1024  # of a plain prompt
OPENING_TOKENS = 256
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
          "client", "server")  # fmt: skip


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that has been read to its end.

    Args:
        scope: the parts of the ASGI scope that cross processes.
        opening: equal for requests that begin alike, see `opening`; empty: any replica will do.
    """

    scope: dict[str, Any]
    body: bytes
    opening: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> ForwardedRequest:
        """The request with the id under which the ingress logs it, so that the replica's log has the same."""
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        record = current_record.get()
        if record is not None:
            headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            kept["headers"] = [*headers, (b"x-request-id", record.id.encode())]
        return cls(kept, body, opening(body))


def opening(body: bytes) -> str:
    """A digest of how a JSON request's prompt begins, and of its ``cache_salt``; empty where it holds none.

    A chat begins with its messages up to the first one of the user: they stay the same in every turn of a conversation, while
    conversations that share a long system prompt still spread over the replicas. Other prompts begin with their first
    characters or tokens.
    """
    try:
        request = json.loads(body)
        beginning = _beginning(request) if isinstance(request, dict) else None
        text = json.dumps([request.get("cache_salt"), beginning]) if beginning else ""
    except (ValueError, RecursionError):  # a replica refuses it, and says why
        return ""
    return blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def _beginning(request: dict[str, Any]) -> Any:
    messages = request.get("messages") or request.get("input")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
        return [request.get("instructions"), messages[: users[0] + 1 if users else None]] if messages else None
    prompt = messages or request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several prompts the first one decides
    if isinstance(prompt, str):
        return prompt[:OPENING_CHARS]
    return prompt[:OPENING_TOKENS] if isinstance(prompt, list) else None
