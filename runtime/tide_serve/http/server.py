"""The server: its socket and TLS files, uvicorn set up for a network, and an end that loses no request."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from time import monotonic
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from tide_runtime.errors import ParamsError

from tide_serve.api.service import Service
from tide_serve.config import ServeConfig
from tide_serve.http.connection import GuardedConnection

_log = logging.getLogger("tide_serve")
_KEEP_ALIVE_S = 75  # longer than load balancers keep theirs, or they would send requests into closed connections
_TICK_S = 0.05
_FINAL_ANSWERS_S = 2  # seconds in which truncated answers may still reach their clients
_ONE_SIGNAL_S = 0.5  # signals so close are one: `timeout` and wrappers send theirs to the process and to its group
_MAX_FILES = 65536
# Bounds the kernel's memory for a client that does not read, and lets `GuardedConnection` notice it after 256 KiB.
_SEND_BUFFER_BYTES = 256 * 2**10
_FIRST_FD = 3  # SD_LISTEN_FDS_START


class DrainingServer(uvicorn.Server):
    """Ends on SIGTERM or Ctrl-C when the requests in progress are answered.

    Until then new ones get 503. After ``drain_timeout`` the engines are closed, so that the remaining requests end with what
    they have. A second signal, not of the same moment, ends the process, also where a step hangs, with the exit code 128 and the
    signal's number.

    Args:
        listening: called when connections are accepted.
        shared: others hold the listening socket too, so new connections are left to the server that follows.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listening: Callable[[], None], shared: bool = False) -> None:
        super().__init__(config)
        self._service = service
        self._listening = listening
        self._drain_until = 0.0
        self._drain_from = 0.0
        self._waits_said = False
        self._shared = shared
        self._forced_by: int | None = None  # the second signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            if monotonic() - self._drain_from < _ONE_SIGNAL_S:
                return
            self._forced_by = sig
            self.should_exit = self.force_exit = True
        else:
            self._drain_from = monotonic()
            self._drain_until = self._drain_from + self._service.config.drain_timeout
            self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._service.draining and not self.should_exit:
            for server in self.servers if self._shared else ():
                server.close()
            if monotonic() >= self._drain_until or not self._service.metrics.in_progress:
                await self._close_engines()
                self.should_exit = True
            elif not self._waits_said:
                self._waits_said = True
                answers = self._service.metrics.in_progress
                seconds = self._service.config.drain_timeout
                _log.info("waits for %d answers, %g s at most; a second signal ends the server at once", answers, seconds)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._forced_by is not None:
            answers = [*self.server_state.tasks]
            for answer in answers:
                answer.cancel()
            if answers:
                await asyncio.wait(answers, timeout=_FINAL_ANSWERS_S)  # for their lines in the log
            # An orderly end joins the threads of the engines and of asyncio's executor, and one that hangs would keep it.
            os._exit(128 + self._forced_by)

    async def _close_engines(self) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._service.models.close, abort=True))
        while not closing.done() and not self.force_exit:
            await asyncio.wait([closing], timeout=_TICK_S)
        end = monotonic() + _FINAL_ANSWERS_S
        while self._service.metrics.in_progress and monotonic() < end and not self.force_exit:
            await asyncio.sleep(_TICK_S)


def run_server(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends the server, then close the engines and the socket.

    Args:
        app: as `tide_serve.http.middlewares.guard` returns it for ``service``.
        listening: called when connections are accepted.
    """
    _allow_many_connections()
    shared = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))  # listens already: see `inherited_socket`
    server = DrainingServer(uvicorn_config(app, service.config, tls), service, listening, shared)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        service.models.close(abort=True)


def uvicorn_config(app: ASGIApp, config: ServeConfig, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """uvicorn's settings for ``app``, with guarded connections."""
    return uvicorn.Config(
        app,
        http=partial(GuardedConnection, config),  # type: ignore[arg-type]  # called as a class is
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # X-Forwarded-For names the client that limits and log lines are about, only where a proxy is declared.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FINAL_ANSWERS_S,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


def _allow_many_connections() -> None:
    """Raise the limit of open files: with the usual 1,024, idle connections would shut out all other clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- socket and TLS, checked before the engine is loaded


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` that does not listen yet, so that nothing connects to a server that still loads.

    Raises ParamsError where the address is in use or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def inherited_socket() -> socket.socket | None:
    """The listening socket that systemd, or whatever else started this process, has handed to it; None: there is none.

    It is the file descriptor 3 where ``LISTEN_PID`` is this process and ``LISTEN_FDS`` is 1 (sd_listen_fds(3)). Whoever holds it
    keeps it open from one server to the next: what connects between them, or while the next one loads, waits.

    Raises ParamsError where it is not one TCP socket that listens.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS")
    problem = f"LISTEN_FDS is {count}"
    if count == "1":
        try:
            listener = socket.socket(fileno=_FIRST_FD)
            listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and listener.family in (socket.AF_INET, socket.AF_INET6):  # only streams listen
                listener.set_inheritable(False)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
                return listener
            problem = f"the socket handed over is of {listener.family.name} and {'listens' if listens else 'does not listen'}"
            listener.detach()
        except OSError as error:
            problem = f"the file descriptor {_FIRST_FD} is no socket ({error})"
    raise ParamsError(
        f"{problem}; hand over one TCP socket that listens, as a .socket unit of systemd with one ListenStream does"
    )


def url_of(listener: socket.socket, tls: bool) -> str:
    """The address of ``listener`` for clients on this machine, without ``/v1``."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect to ``listener``."""
    return ip_address(listener.getsockname()[0]).is_loopback


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """The TLS settings; None without TLS files. Raises ParamsError where they cannot be used."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    for path in (config.tls_certificate, config.tls_key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ParamsError(f"the TLS file {path} cannot be read ({error.strerror}); give a PEM file") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without the empty password, OpenSSL would wait for one on the terminal.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ParamsError(
            f"the TLS files {config.tls_certificate} and {config.tls_key} cannot be used ({error.reason or error}); "
            "give a certificate chain and its private key, both in PEM, the key without a password"
        ) from error
    return context


def _cannot_listen(host: str, port: int, error: Exception) -> ParamsError:
    return ParamsError(f"cannot listen on {host}, port {port} ({error}); choose another --host or --port (0: any free one)")
