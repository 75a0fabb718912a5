"""Where a node is found by the others: its interfaces, the way to the service, and how an address is written."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from ratchet_worker import addresses
from ratchet_worker.addresses import NoAddress, Place, node_place


def nowhere() -> tuple[str, int]:
    raise AssertionError("the service is not asked for")


def test_the_interfaces_of_this_machine_and_what_has_them() -> None:
    found = addresses.interfaces()
    assert "127.0.0.1" in found["lo"]
    assert all(not a.lower().startswith("fe80") and "%" not in a for known in found.values() for a in known)


def test_the_wish_of_the_spec_comes_first_then_the_launchers_word_then_the_way_to_the_service() -> None:
    assert node_place("lo", "192.0.2.1", nowhere) == Place("127.0.0.1", "lo")
    assert node_place(None, "127.0.0.1", nowhere) == Place("127.0.0.1", "lo")
    assert node_place(None, "localhost", nowhere) == Place("127.0.0.1", "lo")  # IPv4 where there is both
    assert node_place(None, None, lambda: ("127.0.0.1", 80)) == Place("127.0.0.1", "lo")


def test_an_address_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(NoAddress, match=r"no interface fabric9 that is up; it has .*lo \(127\.0\.0\.1"):
        node_place("fabric9", None, nowhere)
    with pytest.raises(NoAddress, match=r"192\.0\.2\.77 of this node is at none of its interfaces"):
        node_place(None, "192.0.2.77", nowhere)
    with pytest.raises(NoAddress, match=r"no-such-host\.invalid"):
        node_place(None, "no-such-host.invalid", nowhere)
    with pytest.raises(NoAddress, match="no way to the service"):
        node_place(None, None, lambda: ("no-such-host.invalid", 80))


@pytest.mark.parametrize(
    ("host", "text"),
    [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("node-1.cluster", "node-1.cluster:80")],
)
def test_host_and_port_there_and_back(host: str, text: str) -> None:
    assert addresses.join(host, 80) == text and addresses.split(text) == (host, 80)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "fd00::1:80", "host:x", "host:70000", "host:-1"])
def test_what_is_not_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="port"):
        addresses.split(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listening_node_is_reached_and_one_that_went_is_not(host: str) -> None:
    if host not in addresses.interfaces()["lo"]:
        pytest.skip("this machine has no IPv6")
    with closing(addresses.listen(host, 8)) as listener:
        text = addresses.join(host, listener.getsockname()[1])
        assert listener.family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
        assert addresses.can_reach(text, 5) is None
    assert addresses.can_reach(text, 5) == "Connection refused"
