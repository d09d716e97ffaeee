"""The checks in front of the routes, called without a network."""

import asyncio
import json
import logging
import re
from typing import Any, cast

import httpx
import pytest
from serve.http.stub_server import Seen, call, stub_app, stub_service
from starlette.types import ASGIApp, Message, Send
from tide_serve import ServeConfig
from tide_serve.api.service import Service
from tide_serve.http import middlewares
from tide_serve.http.middlewares import LimitClients, TokenBuckets, guard
from tide_serve.observe.logs import JsonFormatter, TextFormatter
from tide_serve.observe.request_record import RequestRecord, ServerMetrics

KEY, OTHER_KEY = "sk-0123456789abcdef-first", "sk-0123456789abcdef-second"


def guarded(seen: Seen | None = None, **config: Any) -> tuple[ASGIApp, Service]:
    service = stub_service(ServeConfig(model_names=("stub",), **config))
    return guard(stub_app(service, seen or Seen()), service), service


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "tide_serve.access"]


# --- request ids, headers, logs


@pytest.mark.parametrize("given", ["abc-1", None, "", "a b", "x" * 200, 'quote"', "a\tb"])
def test_request_ids(given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: the request that a user reports is not in the log, or a client writes into log or headers what it likes."""
    caplog.set_level(logging.INFO, "tide_serve.access")
    answer = call(guarded()[0], "POST", "/v1/count", json={}, headers={} if given is None else {"X-Request-Id": given})
    made = answer.headers["x-request-id"]
    assert made == access_lines(caplog)[0]["id"] and (made == given if given == "abc-1" else made != given and len(made) == 32)


@pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/count"])
def test_security_headers_are_on_all_answers(path: str) -> None:
    """Breaks: a browser takes an answer with a model's text for a page, and runs what is in it."""
    answer = call(guarded(api_keys=(KEY,))[0], "GET", path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_log_line_has_figures_and_neither_text_nor_key(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: prompts and keys leak into log collectors."""
    caplog.set_level(logging.DEBUG)
    app, _ = guarded(api_keys=(KEY,))
    call(app, "POST", "/v1/count?q=secretquery", json={"prompt": "secret prompt"}, headers=bearer(KEY))
    call(app, "POST", "/v1/count", json={"prompt": "secret prompt"}, headers=bearer("sk-wrong-secret"))
    good, refused = access_lines(caplog)
    assert {"time", "id", "method", "path", "status", "ms", "client"} == set(good)
    assert (good["method"], good["path"], good["status"]) == ("POST", "/v1/count", 200)
    assert (refused["status"], refused["refused"], refused["client"]) == (401, "api_key", None)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("tide_serve"))
    assert "secret" not in text and KEY not in text and len(good["client"]) == 8


def test_failure_is_a_500_and_its_log_hides_the_message(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: an exception that quotes a prompt puts it into the answer of the server or into the log."""
    answer = call(guarded()[0], "POST", "/v1/fail")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    [record] = [record for record in caplog.records if record.name == "tide_serve.error"]
    line = JsonFormatter(log_text=False).format(record)
    assert "secret" not in line + answer.text
    assert json.loads(line)["error"]["class"] == "RuntimeError"
    assert "secret" in JsonFormatter(log_text=True).format(record)


def test_a_line_for_people_has_the_figures_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: whoever tries the server at a terminal reads JSON, without the speed of an answer."""
    caplog.set_level(logging.INFO, "tide_serve.access")
    record = RequestRecord("id", "POST", "/v1/chat/completions", model="m", route="/v1/chat/completions", status=200)
    vars(record).update(prompt_tokens=31, cached_tokens=20, output_tokens=64, first_token_s=0.143, tokens_per_second=42.06)
    record.began -= 2
    record.log(logging.INFO)
    metrics = ServerMetrics()
    metrics.count(record)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d POST /v1/chat/completions 200 in 2\.\d\d s · prompt 31 tokens \(20 cached\) · first token 143 ms · "
        r"new 64 tokens · 42\.1 tokens/s · model: m",
        TextFormatter(log_text=False).format(caplog.records[0]),
    )
    figures = {"cached_tokens": 20, "first_token_ms": 143.0, "tokens_per_second": 42.1}
    assert figures.items() <= access_lines(caplog)[0].items() and 2000 <= access_lines(caplog)[0]["ms"] < 3000
    assert 'tide_http_request_seconds_sum{route="/v1/chat/completions"} 2.' in metrics.text()


async def run(app: ASGIApp, messages: list[Message], send: Send, *headers: tuple[bytes, bytes]) -> None:
    """A POST with a body that comes in ``messages``."""
    left = iter(messages)

    async def receive() -> Message:
        for message in left:
            return message
        return await asyncio.Future()

    names = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked"), *headers]
    scope = {"type": "http", "method": "POST", "path": "/v1/count", "headers": names, "query_string": b"", "root_path": ""}
    await app({**scope, "client": ("192.0.2.1", 1)}, receive, send)


def answered(app: ASGIApp, messages: list[Message], *headers: tuple[bytes, bytes]) -> list[Message]:
    """What the server sends for `run`."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(run(app, messages, send, *headers))
    return sent


# --- keys


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer "}, {"Authorization": KEY}, bearer("wrong"), bearer(KEY + "x")]
)
@pytest.mark.parametrize("path", ["/v1/count", "/metrics", "/v1/nothing", "/health/", "//health", "/Health"])
def test_without_a_right_key_is_401(headers: dict[str, str], path: str) -> None:
    """Breaks: strangers use the model, or read its metrics."""
    seen = Seen()
    answer = call(guarded(seen, api_keys=(OTHER_KEY, KEY))[0], "POST", path, json={}, headers=headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert not seen.bodies and KEY not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(({"Authorization": f"{scheme} {key}"}, 200) for key in (KEY, OTHER_KEY) for scheme in ("Bearer", "bearer")),
        ({"X-Api-Key": KEY}, 200),
        ({"X-Api-Key": "wrong"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": KEY, **bearer("wrong")}, 401),
        ({"X-Api-Key": "wrong", **bearer(KEY)}, 200),
    ],
)
def test_keys_as_clients_send_them(headers: dict[str, str], status: int) -> None:
    """Breaks: one of several users, or Anthropic's clients, are locked out, or a wrong key opens beside a right one."""
    assert call(guarded(api_keys=(KEY, OTHER_KEY))[0], "POST", "/v1/count", json={}, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_fail_when_a_step_hangs(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: a server whose device hangs is never restarted, a load balancer goes on sending it requests, or no log tells it."""
    caplog.set_level(logging.INFO, "tide_serve.access")
    app, service = guarded()
    engine = cast(Any, service.models).engine
    engine.step_time = 599
    assert call(app, "GET", path).status_code == 200
    engine.step_time = 601
    answer = call(app, "GET", path)
    assert (answer.status_code, answer.json()["reason"]) == (503, "a step has not ended in 600 s: the engine hangs")
    assert [line["status"] for line in access_lines(caplog)] == [503]


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ready", 200), ("/", 404), ("/page/app.js", 404)])
def test_probes_and_the_page_need_no_key(path: str, status: int) -> None:
    """Breaks: an orchestrator kills a healthy server, or a browser cannot open the page that asks for the key."""
    assert call(guarded(api_keys=(KEY,))[0], "GET", path).status_code == status  # 404: the stub has no page
    assert call(guarded(api_keys=(KEY,), page=False)[0], "GET", "/").status_code == 401


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: the time of an answer tells how much of a key was right, or which of the keys it is."""
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(middlewares.hmac, "compare_digest", compare_digest)
    digests = [bytes([number]) * 32 for number in range(3)]
    assert middlewares.is_one_of(digests[0], digests) and len(compared) == 3
    assert not middlewares.is_one_of(b"x" * 32, digests) and len(compared) == 6


# --- limits


def test_bucket_fills_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a client sends more than its limit, or stays locked out; or each address that ever asked takes memory."""
    now = [0.0]
    buckets = TokenBuckets(60, clock=lambda: now[0])
    assert [buckets.spend("a")[0] for _ in range(61)] == [True] * 60 + [False]
    assert buckets.spend("b")[0]
    now[0] += 0.9
    assert not buckets.spend("a")[0]
    now[0] += 0.2
    assert buckets.spend("a")[0] and not buckets.spend("a")[0]
    now[0] += 1e6
    assert buckets.spend("a") == (True, 59)
    monkeypatch.setattr(middlewares, "_MAX_BUCKETS", 2)
    assert [buckets.spend(client)[1] for client in "baca"] == [59, 58, 59, 57] and buckets.spend("b")[1] == 59


def test_over_the_rate_is_429_and_headers_tell_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a client cannot pace itself, and OpenAI's client does not know when to try again."""
    now = [0.0]
    limits = LimitClients.__init__
    monkeypatch.setattr(LimitClients, "__init__", lambda *given: limits(*given, clock=lambda: now[0]))
    app, service = guarded(requests_per_minute_per_key=2)
    first, second, third = (call(app, "POST", "/v1/count", json={}) for _ in range(3))
    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second)] == ["1", "0"]
    assert third.headers["retry-after"] == "30" and third.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert (third.json()["error"]["type"], third.json()["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert call(app, "GET", "/health").status_code == 200
    now[0] += 30
    assert call(app, "POST", "/v1/count", json={}).status_code == 200
    assert 'tide_http_refused_total{reason="requests_per_minute"} 1.0' in service.metrics.text()


def test_requests_at_once_are_limited_by_key() -> None:
    """Breaks: one user takes all of the engine, or is locked out after an answer has failed."""
    app, service = guarded(api_keys=(KEY, OTHER_KEY), requests_at_once_per_key=2)

    async def check() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stub") as client:
            one, other = bearer(KEY), bearer(OTHER_KEY)
            running = [asyncio.create_task(client.post("/v1/wait/60", headers=one)) for _ in range(2)]
            while service.metrics.in_progress < 2:
                await asyncio.sleep(0.01)
            third, others = await client.post("/v1/count", headers=one), await client.post("/v1/count", headers=other)
            service.models.close()  # ends them
            await asyncio.gather(*running)
            await client.post("/v1/fail", headers=one)
            after = [await client.post("/v1/count", headers=one) for _ in range(3)]
            assert third.headers["retry-after"] == "1" and third.json()["error"]["code"] == "too_many_requests"
            return [third.status_code, others.status_code, *(answer.status_code for answer in after)]

    assert asyncio.run(check()) == [429, 200, 200, 200, 200]


# --- Anthropic's errors


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("config", "draining", "status", "kind"),
    [
        ({"api_keys": (OTHER_KEY,)}, False, 401, "authentication_error"),
        ({}, True, 503, "overloaded_error"),
        ({"requests_per_minute_per_key": 1}, False, 429, "rate_limit_error"),
        ({"max_body_bytes": 4}, False, 413, "request_too_large"),
        ({"allowed_hosts": ("example.org",)}, False, 421, "invalid_request_error"),
    ],
)
def test_refusals_have_the_form_of_the_routes_api(path: str, config: Any, draining: bool, status: int, kind: str) -> None:
    """Breaks: Anthropic's clients cannot read why a request was refused before it reached its route."""
    app, service = guarded(**config)
    service.draining = draining
    for _ in range(2):
        answer = call(app, "POST", path, json={"a": "long"})
    error = answer.json()["error"]
    assert (answer.status_code, answer.json()["type"], error["type"]) == (status, "error", kind)
    assert set(error) == {"type", "message"} and answer.headers["request-id"] == answer.headers["x-request-id"]
    assert set(call(app, "POST", "/v1/count", json={"a": "long"}).json()["error"]) == {"message", "type", "param", "code"}


# --- bodies


ENDLESS: list[Message] = [{"type": "http.request", "body": b"x" * 60, "more_body": True}] * 1000


@pytest.mark.parametrize(
    ("messages", "header", "status", "kind"),
    [
        *(([], (b"content-length", length), 413, "") for length in (b"1e3", b"-1", b"\xb2", b"99999999999999999999999")),
        (ENDLESS, (b"x", b"x"), 413, "invalid_request_error"),
        (ENDLESS[:1], (b"x", b"x"), 408, "timeout_error"),
    ],
)
def test_bodies_without_a_usable_length(messages: list[Message], header: tuple[bytes, bytes], status: int, kind: str) -> None:
    """Breaks: odd headers that a proxy passes on fail with 500, a body has no limit, or one that never ends holds its place."""
    seen = Seen()
    answers = answered(guarded(seen, max_body_bytes=100, body_timeout=0.05)[0], messages, header)
    assert answers[0]["status"] == status and seen.bodies == []
    assert not kind or json.loads(answers[1]["body"])["error"]["type"] == kind


def test_client_that_leaves_within_its_body_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks: such a request is answered by a route with half a body, or is missing in the log."""
    caplog.set_level(logging.INFO, "tide_serve.access")
    seen = Seen()
    app, service = guarded(seen)
    assert answered(app, [ENDLESS[0], {"type": "http.disconnect"}]) == [] and seen.bodies == []
    assert access_lines(caplog)[0]["status"] == 499 and "tide_http_aborted_total 1.0" in service.metrics.text()


# --- draining, health, metrics, CORS


def test_draining_refuses_new_requests_and_says_when_to_come_back() -> None:
    """Breaks: a rolling update fails requests instead of sending them to another server."""
    app, service = guarded()
    service.draining = True
    answer = call(app, "POST", "/v1/count", json={})
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert call(app, "GET", "/health").status_code == 200
    assert call(app, "GET", "/ready").status_code == 503


def test_ready_and_health_follow_the_engine() -> None:
    """Breaks: a load balancer sends requests to a server that refuses them, or nothing restarts a dead one."""
    app, service = guarded()
    engine: Any = cast(Any, service.models).engine
    assert [call(app, "GET", path).status_code for path in ("/health", "/ready")] == [200, 200]
    engine.waiting = engine.max_queue
    full = call(app, "GET", "/ready")
    assert full.status_code == 503 and "queue" in full.json()["reason"]
    assert call(app, "GET", "/health").status_code == 200
    engine.waiting, engine.healthy = 0, False
    assert [call(app, "GET", path).status_code for path in ("/health", "/ready")] == [503, 503]


def test_metrics_count_by_declared_route() -> None:
    """Breaks: an operator cannot see what the server does, or made-up paths fill the metrics' memory."""
    app, _ = guarded()
    call(app, "POST", "/v1/wait/0")
    call(app, "POST", "/v1/wait/0.001")
    for number in range(3):
        call(app, "GET", f"/made/up/{number}")
    lines = call(app, "GET", "/metrics")
    assert lines.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "tide_running 0" in lines.text  # the engine's own
    assert 'tide_http_requests_total{route="/v1/wait/{seconds}",status="200"} 2.0' in lines.text
    assert 'tide_http_requests_total{route="none",status="404"} 3.0' in lines.text
    assert "tide_http_requests_in_progress 0.0" in lines.text


# --- Host


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 404), ("LOCALHOST:8000", 404), ("127.0.0.1:8000", 404), ("127.8.8.8", 404), ("[::1]:8000", 404),
        ("[::1]", 404), ("models.example.org:80", 404), ("Models.Example.ORG", 404),
        ("rebound.example.org", 421), ("rebound.example.org:8000", 421), ("localhost.example.org", 421), ("192.0.2.1", 421),
        ("127.0.0.1.example.org", 421), ("0.0.0.0", 421), ("", 421), ("[", 421), (":8000", 421),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/v1/models"])
def test_other_hosts_are_misdirected(host: str, status: int, path: str) -> None:
    """Breaks: a web page whose name resolves to 127.0.0.1 after it was loaded (DNS rebinding) reads the local model's answers."""
    app, service = guarded(allowed_hosts=("models.example.org",))
    answer = call(app, "GET", path, headers={"Host": host})
    assert answer.status_code == status  # 404: the stub has neither route
    if status == 421:
        assert answer.json()["error"]["code"] == "wrong_host"
        assert 'tide_http_refused_total{reason="host"} 1.0' in service.metrics.text()


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"example.org"], [b"localhost", b"localhost"]])
def test_one_host_is_needed(hosts: list[bytes]) -> None:
    """Breaks: a proxy in front looks at one header, and this server at the other one."""
    assert answered(guarded(allowed_hosts=())[0], [], *((b"host", host) for host in hosts))[0]["status"] == 421


ORIGIN = {"Origin": "https://example.org"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_cors_is_off_by_default() -> None:
    """Breaks: any web page that a user opens can read what the local model answers."""
    app, _ = guarded()
    assert "access-control-allow-origin" not in call(app, "POST", "/v1/count", json={}, headers=ORIGIN).headers
    assert "access-control-allow-origin" not in call(app, "OPTIONS", "/v1/count", headers=PREFLIGHT).headers


def test_cors_for_given_origins_only() -> None:
    """Breaks: a page of the operator's cannot use the server, or cannot read why it was refused."""
    app, service = guarded(cors_origins=("https://example.org",), api_keys=(KEY,))
    for method in ("GET", "POST", "DELETE"):
        allowed = call(app, "OPTIONS", "/v1/count", headers={**PREFLIGHT, "Access-Control-Request-Method": method})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://example.org"
    refused = call(app, "POST", "/v1/count", json={}, headers=ORIGIN)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://example.org"
    assert {"X-Request-Id", "Retry-After"} <= {*refused.headers["access-control-expose-headers"].split(", ")}
    assert "access-control-allow-credentials" not in refused.headers, "keys are no cookies"
    other = call(app, "POST", "/v1/count", json={}, headers={"Origin": "https://other.org", **bearer(KEY)})
    assert "access-control-allow-origin" not in other.headers
    service.draining = True
    assert "access-control-allow-origin" in call(app, "POST", "/v1/count", json={}, headers=ORIGIN).headers
