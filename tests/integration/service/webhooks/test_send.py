"""Where webhooks' requests go: to public addresses, checked as they are connected to; never further, and never for long."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpcore
import pytest

from ratchet_service.webhooks import send
from ratchet_service.webhooks.send import Answer, Sender, is_permitted
from tests.support.receiver import receiving, to_loopback

PUBLIC = "93.184.216.34"


def post(sender: Sender, url: str) -> Answer:
    return sender.send(url, {"Content-Type": "application/json"}, b"{}")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.1.1",
        "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff0e::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::1", "2001:0:1::1", "64:ff9b:1::7f00:1", "fec0::1", "::127.0.0.1",
        "::ffff:0:127.0.0.1", "192.0.0.192", "192.88.99.1", "168.63.129.16", "5f00::1", "4000::1", "2002:7f00:1::",
        "2001:db8::1", "3fff::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_permitted(address, ())


def test_public_addresses_and_those_of_the_option_are_permitted() -> None:
    assert all(is_permitted(one, ()) for one in (PUBLIC, "1.1.1.1", "2606:2800:220:1::1", "2606:4700::1111"))
    assert is_permitted("::ffff:127.0.0.1", to_loopback()._networks) and not is_permitted(
        "::1", to_loopback()._networks
    )


def resolve_to(monkeypatch: pytest.MonkeyPatch, *answers: Sequence[str]) -> list[str]:
    """Look-ups of names give these addresses, one after another; the list gets each name that was looked up."""
    real, names, left = socket.getaddrinfo, list[str](), list(answers)

    def look_up(host: str, port: Any, *arguments: Any, **more: Any) -> Any:
        if host.replace(".", "").isdigit():
            return real(host, port, *arguments, **more)
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in left.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names


def record_connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that connections were made to; a public one answers nothing."""
    real, dialled = httpcore.SyncBackend.connect_tcp, list[str]()

    def connect(self: httpcore.SyncBackend, host: str, *arguments: Any, **more: Any) -> httpcore.NetworkStream:
        dialled.append(host)
        if host == PUBLIC:
            raise httpcore.ConnectError("no answer")
        return real(self, host, *arguments, **more)

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    return dialled


def test_name_that_resolves_to_a_private_address_at_the_second_look_up_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, dialled = resolve_to(monkeypatch, [PUBLIC], ["127.0.0.1"]), record_connections(monkeypatch)
    with receiving() as receiver:
        url = f"http://rebinding.test:{receiver.port}/"
        first, second = post(Sender(), url), post(Sender(), url)
        assert receiver.requests == []
    assert first.error == f"ConnectError: {PUBLIC}: no answer" and dialled == [PUBLIC]
    assert names == ["rebinding.test"] * 2, (
        "each connection is made to the address that was checked, without another look-up"
    )
    assert second.status is None and "127.0.0.1, which is not public: see the service's --webhook-network" in str(
        second.error
    )


def test_only_permitted_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, ["10.0.0.1", PUBLIC, "127.0.0.1"])
    dialled = record_connections(monkeypatch)
    with receiving() as receiver:
        assert post(to_loopback(), f"http://several.test:{receiver.port}/") == Answer(200, None)
    assert dialled == [PUBLIC, "127.0.0.1"]


def test_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, [PUBLIC, "127.0.0.1"])
    real, timeouts = httpcore.SyncBackend.connect_tcp, list[float]()

    def connect(self: httpcore.SyncBackend, host: str, port: int, timeout: float, *more: Any) -> httpcore.NetworkStream:
        timeouts.append(timeout)
        if host == PUBLIC:
            raise httpcore.ConnectTimeout("timed out")
        return real(self, host, port, timeout, *more)

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with receiving() as receiver:
        assert post(to_loopback(), f"http://several.test:{receiver.port}/") == Answer(200, None)
    assert timeouts[0] == 3 < timeouts[1]


def test_authorities_that_cannot_be_read_are_an_error_of_the_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    answer = post(to_loopback(), "https://127.0.0.1:1/")
    assert answer.status is None and "FileNotFoundError" in str(answer.error)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://localhost:1/", "http://[::1]:1/", "http://2130706433:1/"]
)
def test_private_address_in_the_url_is_refused(url: str) -> None:
    assert "is not public" in str(post(Sender(), url).error)


def test_redirects_are_not_followed() -> None:
    with receiving(lambda _: "redirect") as receiver:
        assert post(to_loopback(), receiver.url) == Answer(302, "redirects are not followed")
        assert len(receiver.requests) == 1


@pytest.mark.parametrize("answer", ["hang", "drip", "flood"])
def test_request_ends_at_the_deadline_and_after_few_bytes(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """``drip``: a byte comes long before each read's end, so that only the whole request's deadline ends it."""
    monkeypatch.setattr(send, "DEADLINE", 3.0)
    with receiving(lambda _: answer) as receiver:
        began = time.monotonic()
        result = post(to_loopback(), receiver.url)
        assert time.monotonic() - began < 10, "a receiver answers as long as it is read"
    assert (result.status, result.error is None) == ((None, False) if answer == "hang" else (200, True))


def test_request_ends_at_the_deadline_although_the_receiver_takes_its_body_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part of the body is taken long before the end of that part's own time."""
    monkeypatch.setattr(send, "DEADLINE", 1.0)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take_slowly() -> None:
            connection, _ = listener.accept()
            with connection:
                while not ended.wait(0.05) and connection.recv(1 << 20):
                    pass

        threading.Thread(target=take_slowly, daemon=True).start()
        with ThreadPoolExecutor(1) as pool:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            sent = pool.submit(to_loopback().send, url, {"Content-Length": str(1 << 28)}, bytes(1 << 28))
            try:
                answer = sent.result(15)
            finally:
                ended.set()
    # the time of a part may end first, if the receiver is slower than meant
    assert answer.status is None and any(text in str(answer.error) for text in ("took more than 1 s", "timed out"))


def test_slow_look_up_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "DEADLINE", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3) or [])
    assert "the look-up of slow.test took more than" in str(post(Sender(), "http://slow.test/").error)


@pytest.mark.parametrize("url", ["http://nowhere.invalid/", "http://127.0.0.1:1/", "http://" + "a" * 300 + "/"])
def test_unreachable_receiver_is_an_error_of_the_delivery(url: str) -> None:
    answer = post(to_loopback(), url)
    assert answer.status is None and answer.error


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_certificate_is_verified_with_the_name_in_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    command += [
        "-subj",
        "/CN=hooks.test",
        "-addext",
        "subjectAltName=DNS:hooks.test",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    resolve_to(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"])
    with receiving(tls=context) as receiver:
        unknown = post(to_loopback(), f"https://hooks.test:{receiver.port}/")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        sender = to_loopback()
        right = post(sender, f"https://hooks.test:{receiver.port}/")
        wrong = post(sender, f"https://other.test:{receiver.port}/")
        assert len(receiver.requests) == 1
    assert right == Answer(200, None) and names == ["hooks.test", "hooks.test", "other.test"]
    for refused in (unknown, wrong):
        assert refused.status is None and "certificate" in str(refused.error).lower()
