"""Where the server listens: its socket and its TLS files, both checked before the engine is loaded."""

from __future__ import annotations

import socket
import ssl
from ipaddress import ip_address
from pathlib import Path

from tide_runtime.errors import ParamsError

from tide_serve.config import ServeConfig

# Bounds the kernel's memory for a client that does not read, and lets `GuardedConnection` notice it after 256 KiB.
_SEND_BUFFER_BYTES = 256 * 2**10


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` that does not listen yet, so that nothing connects to a server that still loads.

    Raises ParamsError where the address is taken or is not this machine's.
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
        _check_readable(path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_no_password)
    except ssl.SSLError as error:
        raise ParamsError(
            f"the TLS files {config.tls_certificate} and {config.tls_key} cannot be used ({error.reason or error}); "
            "give a certificate chain and its private key, both in PEM, the key without a password"
        ) from error
    return context


def _check_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ParamsError(f"the TLS file {path} cannot be read ({error.strerror}); give a PEM file") from error


def _no_password() -> str:
    return ""  # instead of a prompt on the terminal


def _cannot_listen(host: str, port: int, error: Exception) -> ParamsError:
    return ParamsError(f"cannot listen on {host}, port {port} ({error}); choose another --host or --port (0: any free one)")
