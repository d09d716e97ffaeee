"""The ingress: what it answers and refuses itself, and what it sends on."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.cluster.scripted_replicas import JSON, Replicas, part
from tide_serve import ServeConfig
from tide_serve.cluster import ingress

KEY = "key-0123456789abcdef"
ANSWER = [JSON, part(b"{}", more_body=False)]


def _send(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    """One replica that answers once, behind the ingress that `ingress_builder` makes."""
    replicas = Replicas(ANSWER)
    monkeypatch.setattr(ingress.serve, "get_deployment_handle", lambda name: replicas)
    monkeypatch.setattr(ingress, "log_to_stderr", lambda log_text: None)
    return replicas


def test_keys_of_the_file_are_needed(replicas: Replicas, tmp_path: Path):
    """Breaks: a cluster on a network answers whoever reaches it."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    app = ingress.ingress_builder("Model", ServeConfig(), keys)()
    assert _send(app, "POST", "/v1/completions", content=b"{}").status_code == 401
    assert not replicas.requests
    answer = _send(app, "POST", "/v1/completions", content=b"{}", headers={"Authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.text) == (200, "{}")


def test_limits_hold_before_a_replica_is_asked(replicas: Replicas):
    """Breaks: large bodies travel through the cluster to be refused at its end."""
    app = ingress.ingress_builder("Model", ServeConfig(max_body_bytes=10))()
    assert _send(app, "POST", "/v1/completions", content=b"x" * 11).status_code == 413
    assert not replicas.requests


def test_replica_gets_the_request(replicas: Replicas):
    """Breaks: a route sees another path or query than the client's, or the replica's log another id than the client."""
    app = ingress.ingress_builder("Model", ServeConfig())()
    _send(app, "POST", "/v1/models/a%2Fb?x=1", content=b"{}", headers={"X-Request-Id": "not fine", "X-Mine": "1"})
    (request,) = replicas.requests
    headers = request.scope["headers"]
    assert (request.scope["method"], request.scope["path"], request.scope["query_string"]) == ("POST", "/v1/models/a/b", b"x=1")
    assert request.scope["raw_path"] == b"/v1/models/a%2Fb" and (b"x-mine", b"1") in headers
    (request_id,) = [value for name, value in headers if name == b"x-request-id"]
    assert len(request_id) == 32  # the ingress has replaced one that no log can hold


def test_health_needs_no_replica(replicas: Replicas):
    """Breaks: Kubernetes restarts a machine because the models of other machines are still loading."""
    app = ingress.ingress_builder("Model", ServeConfig())()
    assert _send(app, "GET", "/health").status_code == 200
    assert not replicas.requests
    assert _send(app, "GET", "/ready").status_code == 200
    assert len(replicas.requests) == 1
