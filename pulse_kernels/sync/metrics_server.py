"""GET /metrics over HTTP, from a daemon thread: what ``Metrics.serve`` gives."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from pulse_kernels.sync.metrics import CONTENT_TYPE


class MetricsServer:
    """Serves what ``render`` returns until ``close()``, which is also what leaving a ``with`` block does.

    host, port: the address that is listened at. Raises OSError where it is taken or not this machine's, ValueError
    where there is no such port.
    """

    def __init__(self, render: Callable[[], str], host: str, port: int) -> None:
        class Handler(_Handler):
            pass

        Handler.render = staticmethod(render)
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port is {port}, expected 0 (a free one) to 65535")
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), Handler)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise OSError(
                error.errno,
                f"metrics cannot be served at {where}: {error.strerror or error}; choose another port, or 0 for a free "
                "one, and an address of this machine",
            ) from error
        self.host, self.port = str(self._server.server_address[0]), int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="pulse-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where a scraper finds it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop and free the port. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service, which may hang
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away is no news on the trainer's standard error."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "pulse_kernels", ""
    timeout = 10  # seconds until a client that says nothing is let go
    render: Callable[[], str]

    def do_GET(self) -> None:
        if self.path.split("?", 1)[0] != "/metrics":
            self._answer(404, b"The metrics are at /metrics\n")
            return
        self._answer(200, self.render().encode(), CONTENT_TYPE)

    def _not_allowed(self) -> None:
        self._answer(405, b"" if self.command == "HEAD" else b"Only GET is answered here\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _not_allowed

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        if status == 405:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: standard error is the trainer's."""
