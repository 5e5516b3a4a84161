"""The workbench over HTTP: answers, refusals and searches."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from debubble.ir import InputError
from debubble.processes import PYTHON
from debubble.serve import Workbench
from debubble.serve.searches import MAX_SEARCHES
from debubble.serve.server import MAX_UNAUTHENTICATED
from tests.support.processes import children, wait_for_end

TINY = {"model": "llama-tiny", "cluster": "2xA100-80GB", "micro_batches": "4", "sequence_length": "128"}


@pytest.fixture
def workbench() -> Iterator[Workbench]:
    with Workbench() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Client:
    """A browser's requests."""

    def __init__(self, address: str) -> None:
        url = urlsplit(address)
        self.place = url.netloc
        self.token = parse_qs(url.query)["token"][0]

    def ask(
        self,
        path: str,
        *,
        form: Any = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> tuple[int, bytes]:
        body = content if form is None else json.dumps(form).encode()
        method = "GET" if body is None else "POST"
        parameters = urlencode({"token": self.token, **query})
        with closing(HTTPConnection(self.place, timeout=60)) as connection:
            connection.request(method, f"/{path}?{parameters}", body, {"Host": self.place, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read()

    def connect(self) -> socket.socket:
        """A connection on which nothing has been sent yet."""
        host, _, port = self.place.partition(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def search(self, form: dict[str, str]) -> int:
        """Start a search; returns its number."""
        status, answer = self.ask("search", form=form)
        assert status == 200, answer
        number: int = json.loads(answer)["number"]
        return number

    def state(self, number: int) -> dict[str, Any]:
        """The state of a search."""
        state: dict[str, Any] = json.loads(self.ask("search", number=number)[1])
        return state


@pytest.fixture
def client(workbench: Workbench) -> Client:
    return Client(workbench.address)


@pytest.mark.parametrize(
    ("headers", "query"),
    [({}, {"token": "wrong"}), ({"Host": "evil.example"}, {}), ({"Origin": "https://evil.example"}, {})],
)
def test_foreign_requests_are_refused(client: Client, headers: dict[str, str], query: dict[str, Any]) -> None:
    assert client.ask("", headers=headers, **query)[0] == 403
    assert client.ask("search", form=TINY, headers=headers, **query)[0] == 403


def test_the_page_has_forms_with_all_names_on_this_machine_alone(workbench: Workbench, client: Client) -> None:
    status, page = client.ask("")

    assert (status, workbench.server_address[0]) == (200, "127.0.0.1")
    for name in ("llama2-13b", "8xA100-80GB", "portfolio", "zb-h1", "megatron"):
        assert name in page.decode()


def test_a_search_gives_report_plan_and_export(workbench: Workbench, client: Client) -> None:
    number = client.search({**TINY, "planner": "dapple"})
    workbench.searches[number].wait()

    state = client.state(number)
    assert state["state"] == "done"
    assert state["found"].startswith("1f1b, ")
    assert b"Does it fit?" in client.ask("report", number=number)[1]
    assert json.loads(client.ask("plan", number=number)[1])["planner"] == "dapple"
    assert b"Side by side" in client.ask("compare", number=number, other=number)[1]
    with zipfile.ZipFile(io.BytesIO(client.ask("export", number=number, to="torch")[1])) as archive:
        assert "torch/schedule.csv" in archive.namelist()
        assert "torch/what-is-lost.txt" in archive.namelist()


@pytest.mark.parametrize("model", [pytest.param("llama9", marks=pytest.mark.slow), "--help"])
def test_failed_search_explains_why_in_a_sentence(workbench: Workbench, client: Client, model: str) -> None:
    number = client.search({**TINY, "model": model, "planner": "dapple"})
    workbench.searches[number].wait()

    state = client.state(number)
    assert state["state"] == "failed"
    assert model in state["error"]
    assert client.ask("report", number=number)[0] == 422


def test_the_page_answers_while_a_search_runs_until_stopped(workbench: Workbench, client: Client) -> None:
    number = client.search({**TINY, "planner": "auto", "effort": "60"})

    assert client.ask("")[0] == 200
    assert client.state(number)["state"] == "running"
    client.ask("stop", form={}, number=number)
    workbench.searches[number].wait()
    assert client.state(number)["state"] != "running"


def test_a_trial_is_simulated_at_once(client: Client) -> None:
    form = {"model": "llama-tiny", "cluster": "2xA100-80GB", "schedule": "1f1b", "sequence_length": "128"}
    few, many = (json.loads(client.ask("trial", form={**form, "micro_batches": m})[1]) for m in (2, 16))

    assert float(few["figures"]["bubble"].rstrip("%")) > float(many["figures"]["bubble"].rstrip("%"))
    assert "<canvas" in few["page"]


@pytest.mark.parametrize(
    ("path", "content", "sentence"),
    [
        ("trial", b'{"model": "llama-tiny", "cluster": "2xA100-80GB", "micro_batches": "many"}', "The form is wrong"),
        ("trial", b'{"model": "llama2-70b", "cluster": "2xA100-80GB"}', "GiB"),
        ("trial", b'{"model": "llama-tiny", "cluster": "2xA100-80GB", "micro_batches": 99999}', "too many to follow"),
        ("search", b"[1]", "A form is one JSON object"),
        ("search", b'{"model": "", "cluster": "2xA100-80GB"}', "Choose a model and a cluster."),
        (
            "search",
            b'{"model": "llama-tiny", "cluster": "2xA100-80GB", "planner": "mine.py:plan"}',
            "There is no planner 'mine.py:plan'",
        ),
        ("trial", b"[" * 100_000, "The form is wrong: it is nested too deeply"),
        ("search", b'{"model": "\xff"}', "The form is wrong: it is not a text file"),
        ("trial", b'{"micro_batches": ' + b"9" * 5000 + b"}", "The form is wrong: integer value out of range"),
    ],
)
def test_bad_input_is_a_sentence(client: Client, path: str, content: bytes, sentence: str) -> None:
    status, answer = client.ask(path, content=content)

    assert status == 422
    assert sentence in json.loads(answer)["error"]


def test_unknown_paths_are_404(client: Client) -> None:
    assert client.ask("nothing")[0] == 404
    assert client.ask("report", number=7)[0] == client.ask("report")[0] == 422
    assert client.ask("search", number="9" * 5000)[0] == 422


@pytest.mark.parametrize("request_line", [b"GET //[ HTTP/1.0", b"\x16\x03\x01", b"NONSENSE / HTTP/1.0"])
def test_garbage_is_answered_and_the_workbench_continues(client: Client, request_line: bytes) -> None:
    with client.connect() as garbage:
        garbage.sendall(request_line + b"\r\n\r\n")
        garbage.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: garbage.recv(4096), b""))
    assert re.search(rb"40\d|50[15]", answer[:400])
    assert client.ask("")[0] == 200


def test_half_open_connections_do_not_block_others(client: Client) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MAX_UNAUTHENTICATED):
            stack.enter_context(client.connect())
        assert client.ask("")[0] == 200


def test_a_hundred_trials_at_once_are_all_answered(client: Client) -> None:
    form = {"model": "llama-tiny", "cluster": "2xA100-80GB", "micro_batches": "16", "sequence_length": "128"}
    with ThreadPoolExecutor(100) as browsers:
        answers = [browsers.submit(client.ask, "trial", form=form) for _ in range(100)]
        codes = [answer.result()[0] for answer in answers]
    assert set(codes) <= {200, 503}
    assert codes.count(200) >= 1


def test_a_hundred_searches_at_once_start_two(client: Client) -> None:
    form = {**TINY, "planner": "auto", "effort": "60"}
    with ThreadPoolExecutor(100) as browsers:
        answers = [browsers.submit(client.ask, "search", form=form) for _ in range(100)]
        codes = [answer.result()[0] for answer in answers]
    assert sorted(codes) == [200] * MAX_SEARCHES + [422] * (100 - MAX_SEARCHES)


def descendants(process: int) -> list[int]:
    """All descendants of this process."""
    return [pid for child in children(process) for pid in (child, *descendants(child))]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
def test_a_killed_workbench_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    command = [*PYTHON, "-m", "debubble", "serve", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        address = json.loads("".join(process.stdout.readline() for _ in range(4)))["address"]
        assert Client(address).ask("search", form={**TINY, "planner": "auto", "effort": "60"})[0] == 200
        started = descendants(process.pid)
        process.kill()
    wait_for_end(started)
    assert len(started) >= 2
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_is_refused_with_a_sentence(workbench: Workbench) -> None:
    with pytest.raises(InputError, match=r"Nothing can listen on 127\.0\.0\.1"):
        Workbench(port=workbench.server_address[1])


def test_the_command_prints_its_address_and_ends_when_asked_to() -> None:
    command = [*PYTHON, "-m", "debubble", "serve", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads("".join(process.stdout.readline() for _ in range(4)))["address"]
        client = Client(address)
        status, _ = client.ask("search", form={**TINY, "planner": "auto", "effort": "60"})
        process.terminate()
        _, printed = process.communicate(timeout=60)

    assert status == 200
    assert printed == "The workbench is closed.\n"
