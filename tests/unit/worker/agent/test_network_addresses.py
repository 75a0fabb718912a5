"""Where a node is found by the others: its interfaces, the way to the service, and how an address is written."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from ratchet_worker.agent import network_addresses
from ratchet_worker.agent.network_addresses import NoAddress, Place, find_node_address


def nowhere() -> tuple[str, int]:
    raise AssertionError("the service is not asked for")


def test_interfaces_list_loopback_and_omit_link_local_addresses() -> None:
    found = network_addresses.interfaces()
    assert "127.0.0.1" in found["lo"]
    assert all(not a.lower().startswith("fe80") and "%" not in a for known in found.values() for a in known)


def test_node_address_precedence_is_spec_launcher_then_service_route() -> None:
    assert find_node_address("lo", "192.0.2.1", nowhere) == Place("127.0.0.1", "lo")
    assert find_node_address(None, "127.0.0.1", nowhere) == Place("127.0.0.1", "lo")
    assert find_node_address(None, "localhost", nowhere) == Place("127.0.0.1", "lo")  # IPv4 where there is both
    assert find_node_address(None, None, lambda: ("127.0.0.1", 80)) == Place("127.0.0.1", "lo")


def test_unknown_node_address_is_refused_with_available_ones() -> None:
    with pytest.raises(NoAddress, match=r"no interface fabric9 that is up; it has .*lo \(127\.0\.0\.1"):
        find_node_address("fabric9", None, nowhere)
    with pytest.raises(NoAddress, match=r"192\.0\.2\.77 of this node is at none of its interfaces"):
        find_node_address(None, "192.0.2.77", nowhere)
    with pytest.raises(NoAddress, match=r"no-such-host\.invalid"):
        find_node_address(None, "no-such-host.invalid", nowhere)
    with pytest.raises(NoAddress, match="no route to the service"):
        find_node_address(None, None, lambda: ("no-such-host.invalid", 80))


@pytest.mark.parametrize(
    ("host", "text"),
    [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("node-1.cluster", "node-1.cluster:80")],
)
def test_host_and_port_round_trip(host: str, text: str) -> None:
    assert network_addresses.format_host_port(host, 80) == text and network_addresses.parse_host_port(text) == (
        host,
        80,
    )


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "fd00::1:80", "host:x", "host:70000", "host:-1"])
def test_malformed_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="port"):
        network_addresses.parse_host_port(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_can_reach_detects_listening_and_closed_node(host: str) -> None:
    if host not in network_addresses.interfaces()["lo"]:
        pytest.skip("this machine has no IPv6")
    with closing(network_addresses.listen(host, 8)) as listener:
        text = network_addresses.format_host_port(host, listener.getsockname()[1])
        assert listener.family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
        assert network_addresses.connection_error(text, 5) is None
    assert network_addresses.connection_error(text, 5) == "Connection refused"
