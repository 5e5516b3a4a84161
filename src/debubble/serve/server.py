"""The workbench's server: pages and JSON for one browser on this machine.

Requests need the token and one of the server's host names, against DNS rebinding, and may not have another site's
origin.
"""

from __future__ import annotations

import io
import json
import secrets
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from debubble.costs import hardware
from debubble.errors import DebubbleError
from debubble.exports import exports
from debubble.formatting import size_words, time_words
from debubble.ir import InputError
from debubble.models import models
from debubble.planners import planners
from debubble.schedules import schedules
from debubble.serve.forms import SearchForm, TrialForm, read_form
from debubble.serve.searches import Searches
from debubble.views import Scene, views

MAX_BYTES = 1 << 20
"""Largest size of a request, in bytes."""
MAX_DIGITS = 9
"""Largest number of digits of a search's number in a request."""
MAX_UNAUTHENTICATED = 64
"""Number of open connections without the token; a further one closes the oldest."""
MAX_TRIALS = 8
"""Number of trials that may be queued; they run one at a time."""
SOCKET_TIMEOUT = 60.0
"""Timeout of a connection's reads and writes, in seconds."""


class BusyError(DebubbleError):
    """Too many trials are queued."""


POLICY = "; ".join(
    [
        "default-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'self'",
        "form-action 'none'",
    ]
)


class Workbench(ThreadingHTTPServer):
    """The workbench's HTTP server.  `serve_forever` answers until `shutdown`; `server_close` ends its searches.

    Args:
        host: The address to listen on.
        port: The port; 0: any free port.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._unauthenticated: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._trials, self._trial = threading.BoundedSemaphore(MAX_TRIALS), threading.Lock()
        self.token = secrets.token_urlsafe(16)
        self.searches = Searches()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise InputError(f"Nothing can listen on {host}:{port}: {error.strerror}.") from error

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{self.names[0]}/?token={self.token}"

    @property
    def names(self) -> tuple[str, ...]:
        """The host names with port under which it answers."""
        host, port = self.server_address[:2]
        return tuple(dict.fromkeys(f"{name}:{port}" for name in (str(host), "localhost", "127.0.0.1")))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread, and close the oldest connection without the token if there are too many."""
        with self._lock:
            if len(self._unauthenticated) == MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._unauthenticated[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request on this thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.trust(request)

    def trust(self, connection: socket.socket) -> None:
        """Exempt a connection that has sent the token from being closed."""
        with self._lock:
            self._unauthenticated.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of closed connections, such as of downloads that browsers abort."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Wait until no other trial runs.  Raises BusyError if too many are queued."""
        if not self._trials.acquire(blocking=False):
            raise BusyError(f"{MAX_TRIALS} trials are waiting already: try again.")
        try:
            with self._trial:
                yield
        finally:
            self._trials.release()

    def server_close(self) -> None:
        """Stop listening, and end all searches."""
        super().server_close()
        self.searches.close()


class _Handler(BaseHTTPRequestHandler):
    server: Workbench
    timeout = SOCKET_TIMEOUT

    def do_GET(self) -> None:
        self._answer({"": self._page, "search": self._state, "report": self._report, "compare": self._compare,
                      "plan": self._plan, "export": self._export})  # fmt: skip

    def do_POST(self) -> None:
        self._answer({"search": self._start, "stop": self._stop, "trial": self._trial})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of the base class, such as for unknown methods, as JSON."""
        self._send(HTTPStatus(code), {"error": f"{code:d}: {message or HTTPStatus(code).phrase}"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as log lines would have the token."""

    def _answer(self, routes: dict[str, Any]) -> None:
        try:
            url = urlsplit(self.path)
            self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, {"error": "This is no address."})
        origin = self.headers.get("Origin")
        origins = [f"http://{name}" for name in self.server.names]
        if self.headers.get("Host") not in self.server.names or (origin is not None and origin not in origins):
            return self._send(HTTPStatus.FORBIDDEN, {"error": "This workbench answers only its own page."})
        if not secrets.compare_digest(self.query.get("token", "").encode(), self.server.token.encode()):
            error = "Open the address that `debubble serve` printed: it has the token."
            return self._send(HTTPStatus.FORBIDDEN, {"error": error})
        self.server.trust(self.connection)
        route = routes.get(url.path.strip("/"))
        if route is None:
            return self._send(HTTPStatus.NOT_FOUND, {"error": f"There is nothing at {url.path}."})
        try:
            return route()  # type: ignore[no-any-return]
        except BusyError as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
        except DebubbleError as error:
            return self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})

    def _send(
        self, status: HTTPStatus, content: bytes | dict[str, Any], *, kind: str = "application/json", name: str = ""
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if name:
            self.send_header("Content-Disposition", f'attachment; filename="{name}"')
        self.end_headers()
        self.wfile.write(body)

    def _html(self, page: bytes) -> None:
        self._send(HTTPStatus.OK, page, kind="text/html; charset=utf-8")

    @property
    def _body(self) -> bytes:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_BYTES:
            raise InputError(f"A form has at most {MAX_BYTES} bytes.")
        return self.rfile.read(size)

    def _number(self, name: str = "number") -> int:
        text = self.query.get(name, "")
        if not text.isdecimal() or len(text) > MAX_DIGITS:
            raise InputError(f"Give the search's {name}.")
        return int(text)

    def _page(self) -> None:
        environment = Environment(
            loader=PackageLoader("debubble.serve"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        known = [{"name": device.name, "gib": device.memory / 2**30} for device in hardware.values()]
        page = environment.get_template("workbench.html").render(
            models=list(models), devices=known, planners=["auto", *sorted(set(planners) - {"auto"})],
            schedules=sorted(schedules), targets=list(exports),
        )  # fmt: skip
        self._html(page.encode())

    def _start(self) -> None:
        search = self.server.searches.start(read_form(self._body, SearchForm).arguments)
        self._send(HTTPStatus.OK, {"number": search.number})

    def _state(self) -> None:
        search = self.server.searches[self._number()]
        state, summary = search.state, None
        if state == "done":
            scene = Scene.predicted(search.plan)
            summary = f"{search.plan.schedule.name}, {time_words(scene.step_time, seconds=True)} per step"
        answer = {"state": state, "lines": search.lines[-20:], "error": search.error, "found": summary}
        self._send(HTTPStatus.OK, answer)

    def _stop(self) -> None:
        self.server.searches[self._number()].stop()
        self._send(HTTPStatus.OK, {})

    def _report(self) -> None:
        self._html(views["html"]([Scene.predicted(self.server.searches[self._number()].plan)]))

    def _compare(self) -> None:
        plans = [self.server.searches[self._number(name)].plan for name in ("number", "other")]
        self._html(views["html"]([Scene.predicted(plan) for plan in plans]))

    def _plan(self) -> None:
        search = self.server.searches[self._number()]
        content = (search.folder / "plan.json").read_bytes() if search.plan else b""
        self._send(HTTPStatus.OK, content, name="plan.json")

    def _export(self) -> None:
        target = self.query.get("to", "")
        made = exports[target](self.server.searches[self._number()].plan)
        losses = "\n".join(made.losses) or f"{target} expresses all of the plan."
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in {**made.files, "what-is-lost.txt": losses + "\n"}.items():
                archive.writestr(f"{target}/{name}", content)
        self._send(HTTPStatus.OK, file.getvalue(), kind="application/zip", name=f"{target}.zip")

    def _trial(self) -> None:
        form = read_form(self._body, TrialForm)
        with self.server.trial():
            scene = form.scene()
            page = views["html"]([scene]).decode()
        figures = {
            "step": time_words(scene.step_time, seconds=True),
            "bubble": f"{100 * scene.timeline.bubble_fraction:.1f}%",
            "peak": size_words(max(scene.peak_memory)),
            "limit": size_words(min((limit for limit in scene.limits if limit is not None), default=None)),
        }
        self._send(HTTPStatus.OK, {"figures": figures, "page": page})
