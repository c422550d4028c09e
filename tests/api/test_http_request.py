"""Requests with a deadline, and what they say when no whole answer comes."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcli.api.http_request import HttpRequest, ServerGone, ServerLate


@contextmanager
def serving(answer):
    """The address of a server whose handler of every request is `answer(handler)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def saying(content, length=None):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def dripping(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def test_a_request_sends_its_query_body_and_key():
    seen = []

    def answer(handler):
        content = handler.rfile.read(int(handler.headers["Content-Length"]))
        seen.append((handler.command, handler.path, handler.headers["Authorization"], content))
        saying(b"yes")(handler)

    with serving(answer) as address:
        request = HttpRequest(f"{address}/ask?again=1", 10, {"a": 1}, key="secret")
        assert request.answer(100).content == b"yes"
    assert seen == [("POST", "/ask?again=1", "Bearer secret", b'{"a": 1}')]


def test_an_answer_that_is_too_large_is_read_until_it_has_one_byte_more():
    with serving(saying(b"0123456789")) as address:
        assert HttpRequest(address, 10).answer(4).content == b"01234"


def test_half_an_answer_is_none():
    ends = pytest.raises(ServerGone, match="the answer to /half ends after 4 of 10 bytes")
    with serving(saying(b"0123", length=10)) as address, ends:
        HttpRequest(f"{address}/half", 10).answer(100)


def test_an_answer_that_drips_in_has_a_deadline():
    is_late = pytest.raises(ServerLate, match=r"no answer to /slow within 0\.2 s")
    with serving(dripping) as address, is_late:
        HttpRequest(f"{address}/slow", 0.2).answer(10_000)


def test_another_thread_can_cut_a_request_off():
    with serving(dripping) as address:
        request = HttpRequest(address, 60)
        threading.Timer(0.2, request.cut).start()
        with pytest.raises(ServerLate):
            request.answer(10_000)


def test_a_request_that_was_cut_off_before_it_began_gets_no_answer():
    with serving(saying(b"yes")) as address:
        request = HttpRequest(address, 60)
        request.cut()
        with pytest.raises(ServerLate):
            request.answer(100)
