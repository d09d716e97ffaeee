"""Hostile clients at the sockets of a live server without a model."""

import json
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from serve.http.stub_server import Stub, stub_server
from slow_cases import slow_but
from tide_runtime.errors import ParamsError
from tide_serve import ServeConfig
from tide_serve.http.connection import MAX_HEADER_BYTES, GuardedConnection
from tide_serve.http.server import bound_socket, tls_context

# Short times for what a test waits for; requests of well-behaved clients take a few milliseconds.
SHORT = ServeConfig(model_names=("stub",), body_timeout=0.3, write_timeout=0.3, max_body_bytes=100_000)
LONG = ServeConfig(model_names=("stub",), max_body_bytes=100_000)
STREAM = b"POST /v1/stream HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"POST /v1/wait/1 HTTP/1.1\r\nHost: x\r\n\r\n"  # three times body_timeout
LOOPS = ("uvloop", "asyncio")


@pytest.fixture(scope="module", params=slow_but(LOOPS, "uvloop"))
def hurried(request: pytest.FixtureRequest) -> Iterator[Stub]:
    """A server with short times, on both event loops, whose transports differ in when they report a full buffer."""
    with stub_server(SHORT, loop=request.param) as stub:
        yield stub


@pytest.fixture(scope="module")
def patient() -> Iterator[Stub]:
    """A server whose times never run out within a test."""
    with stub_server(LONG) as stub:
        yield stub


def answer_of(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection, which the server has to close."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def first_answer(stub: Stub, request: bytes, then: bytes = b"") -> tuple[socket.socket, bytes]:
    """A connection and what the server first answers to ``request``, ``then`` being sent while a route works on it.

    Tried again where the machine is so busy that the request itself misses the server's short times.
    """
    for _ in range(10):
        stub.seen.begun.clear()
        connection = stub.connect()
        with suppress(ConnectionError):
            connection.sendall(request)
            if then and stub.seen.begun.wait(5):
                connection.sendall(then)
            if answer := connection.recv(65536):
                return connection, answer
        connection.close()
    pytest.fail("the server closed ten connections without an answer")


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def assert_serves(stub: Stub) -> None:
    assert httpx.post(f"{stub.url}/v1/count", json={}, timeout=30).json() == {"bytes": 2}


# --- clients that send slowly


@pytest.mark.parametrize("sent", [b"", b"POST /v1/cou", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
def test_slow_headers_end_the_connection(hurried: Stub, sent: bytes) -> None:
    """Breaks: a client that opens connections and never finishes its headers keeps all of them."""
    with hurried.connect() as connection:
        connection.sendall(sent)
        assert answer_of(connection) == b""


def test_trickled_headers_do_not_extend_the_time(hurried: Stub) -> None:
    """Breaks: a byte now and then (slowloris) keeps a connection for ever."""
    with hurried.connect() as connection:
        connection.settimeout(0.02)
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(1500):  # 30 s
            try:
                connection.sendall(b"a")
                if connection.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the connection stayed open for 30 s")


def test_slow_body_is_told_why(hurried: Stub) -> None:
    """Breaks: a client on a bad line sees a connection that ends without a reason."""
    connection, answer = first_answer(hurried, b"POST /v1/count HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
    with connection:
        assert error_of(answer + answer_of(connection)) == (408, "body_timeout")


def test_second_request_of_a_connection_must_arrive_in_time_too(hurried: Stub) -> None:
    """Breaks: one good request buys a connection that may then trickle for ever."""
    connection, answer = first_answer(hurried, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with connection:
        while b"}" not in answer:  # its body may come in a packet of its own
            answer += connection.recv(65536)
        connection.sendall(b"GET /health HT")
        assert answer_of(connection) == b""


def test_long_answers_are_not_cut_by_the_request_timer(hurried: Stub) -> None:
    """Breaks: generations that take longer than a request may take to arrive are cut off."""
    connection, answer = first_answer(hurried, WAIT)
    with connection:
        assert b"200 OK" in answer


def test_next_request_may_begin_while_an_answer_is_awaited(hurried: Stub) -> None:
    """Breaks: a long answer is cut off because the client's next request, which the server does not read yet, is incomplete."""
    connection, answer = first_answer(hurried, WAIT, then=b"POST /v1/cou")
    with connection:
        assert b"200 OK" in answer


# --- clients that do not read


def test_reader_that_stops_is_disconnected_and_its_stream_ends(hurried: Stub) -> None:
    """Breaks: clients that never read keep generations, memory and places of other clients."""
    hurried.seen.left.clear()
    connection, _ = first_answer(hurried, STREAM)
    with connection:
        assert hurried.seen.left.wait(30)
        hurried.eventually(lambda: hurried.service.metrics.in_progress == 0)


def test_stream_that_is_read_goes_on(patient: Stub) -> None:
    """Breaks: an answer stops at the first full buffer."""
    patient.seen.left.clear()
    with patient.connect() as connection:
        connection.sendall(STREAM)
        received = 0
        while received < 64 * 2**20:  # far more than all buffers on the way hold
            received += len(part := connection.recv(2**20))
            assert part, "the server has closed the connection"
    assert patient.seen.left.wait(30)  # leaving ends the stream at once


def test_only_a_client_that_reads_nothing_at_all_is_disconnected() -> None:
    """Breaks: a long answer that is written at once is lost on a slow line, as its buffer is not empty after the timeout."""
    loop, transport = Mock(), Mock()
    connection = object.__new__(GuardedConnection)
    connection.loop, connection.transport, connection._limits = loop, transport, ServeConfig(write_timeout=60)
    for unread in (1000, 999, 1):
        transport.get_write_buffer_size.return_value = unread - 1
        connection._check_reader(unread)
        loop.call_later.assert_called_with(60, connection._check_reader, unread - 1)
    transport.abort.assert_not_called()
    transport.get_write_buffer_size.return_value = 1000
    connection._check_reader(1000)
    transport.abort.assert_called_once_with()


# --- bodies and headers that are too large


@pytest.mark.parametrize("size", [100_001, 10 * 2**20])
@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_refused_and_the_client_reads_why(patient: Stub, size: int, chunked: bool) -> None:
    """Breaks: a client sees a broken connection instead of 413, and tries the same again."""
    patient.seen.bodies.clear()
    with httpx.Client(base_url=patient.url, timeout=30) as client:
        answer = client.post("/v1/count", content=(b"x" * 65536 for _ in range(size // 65536 + 1)) if chunked else b"x" * size)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        assert patient.seen.bodies == []
        assert client.post("/v1/count", json={}).status_code == 200  # the connection is still good


def test_endless_refused_body_is_cut_off(patient: Stub) -> None:
    """Breaks: a client without a key keeps the server busy reading what nobody wants."""
    with patient.connect() as connection:
        connection.sendall(b"POST /v1/count HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(2000):  # 2 GB
                connection.sendall(b"x" * 2**20)


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        b"X: " + b"a" * 20 * MAX_HEADER_BYTES,
        b"".join(b"x%d: a\r\n" % number for number in range(5000)) + b"\r\n",
    ],
    ids=["one", "unfinished", "many"],
)
def test_large_headers_are_431(patient: Stub, headers: bytes) -> None:
    """Breaks: headers without end fill the memory; httptools has no limit of its own."""
    with patient.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers)
        answer = answer_of(connection)
    assert not answer or error_of(answer) == (431, "headers_too_large")  # nothing where a reset overtakes the answer
    assert_serves(patient)


# --- what is not HTTP


GARBAGE = [
    b"\x16\x03\x01\x02\x00",
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\xff" * 1000,
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_400_and_harms_nothing_else(patient: Stub, garbage: bytes) -> None:
    """Breaks: a port scan takes the server down."""
    with patient.connect() as connection:
        connection.sendall(garbage)
        assert error_of(answer_of(connection)) == (400, "invalid_http")
    assert_serves(patient)


def test_a_thousand_idle_connections_leave_room_for_others(patient: Stub) -> None:
    """Breaks: idle clients shut all others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as idle:
        for number in range(1000):
            connection = idle.enter_context(patient.connect())
            if number % 2:
                connection.sendall(b"POST /v1/count HTTP/1.1\r\n")
        for _ in range(20):
            assert_serves(patient)


# --- TLS


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    pytest.importorskip("cryptography", reason="makes the certificate")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for file, encryption in (
        ("key.pem", serialization.NoEncryption()),
        ("locked.pem", serialization.BestAvailableEncryption(b"password")),
    ):
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
        (folder / file).write_bytes(key.private_bytes(*form, encryption))
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.parametrize("loop", LOOPS)
def test_tls_serves_and_disconnects_readers_that_stop(tls_files: tuple[Path, Path], loop: str) -> None:
    """Breaks: encryption turns the limits off, as it buffers in another place."""
    config = ServeConfig(model_names=("stub",), write_timeout=0.3, tls_certificate=tls_files[0], tls_key=tls_files[1])
    client = ssl.create_default_context(cafile=str(tls_files[0]))
    with stub_server(config, tls=tls_context(config), loop=loop) as stub:
        url = f"https://localhost:{stub.address[1]}"
        assert httpx.post(f"{url}/v1/count", json={}, verify=client, timeout=30).json() == {"bytes": 2}
        with stub.connect() as plain, client.wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(STREAM)
            assert stub.seen.left.wait(30)


def test_tls_files_that_cannot_work_are_named(tls_files: tuple[Path, Path], tmp_path: Path) -> None:
    """Breaks: the server loads the model for minutes, and then fails or waits for a password on the terminal."""
    certificate, key = tls_files
    (tmp_path / "not.pem").write_text("no certificate")
    for given, hint in (
        ((certificate, key.with_name("locked.pem")), "without a password"),
        ((tmp_path / "not.pem", key), "both in PEM"),
        ((tmp_path / "missing.pem", key), "cannot be read"),
        ((key, certificate), "both in PEM"),
    ):
        with pytest.raises(ParamsError, match=hint):
            tls_context(ServeConfig(tls_certificate=given[0], tls_key=given[1]))


def test_address_that_is_taken_is_named() -> None:
    """Breaks: the server says so only after the model is loaded, with a traceback."""
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ParamsError, match=r"cannot listen on 127\.0\.0\.1"):
            bound_socket("127.0.0.1", first.getsockname()[1])
    with pytest.raises(ParamsError, match=r"cannot listen on 192\.0\.2\.1"):
        bound_socket("192.0.2.1", 0)
