"""Who may talk to whom in the namespace of ``deploy/kubernetes``, by its network policies."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_kustomize import build, of_kind
from tests.support.network_policies import is_allowed, is_egress_allowed, is_ingress_allowed

OVERLAYS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "overlays"
PARTIES = ("api", "reconciler", "database", "worker", "stranger")
MAY = {
    ("worker", "worker", 41234), ("worker", "worker", 8000), ("worker", "worker", 5432), ("worker", "api", 8000),
    ("api", "database", 5432), ("reconciler", "database", 5432),
}  # fmt: skip


def test_network_policies_allow_only_intended_pod_traffic() -> None:
    policies = list(of_kind(build(OVERLAYS / "postgres"), "NetworkPolicy").values())
    ports = (8000, 5432, 41234)
    found = {(a, b, port) for a in PARTIES for b in PARTIES for port in ports if is_allowed(policies, a, b, port)}
    assert found == MAY
    assert all(is_egress_allowed(policies, party, 53, "kube-system") for party in PARTIES), "names are looked up"
    outside = {
        (party, port)
        for party in PARTIES
        for port in (443, 6443, 5432)
        if is_egress_allowed(policies, party, port, None)
    }
    assert outside == {("reconciler", 443), ("reconciler", 6443)}, "Kubernetes' own API"


def test_an_external_database_is_reached_by_api_and_reconciler_alone() -> None:
    policies = list(of_kind(build(OVERLAYS / "external-database"), "NetworkPolicy").values())
    outside = {party for party in PARTIES if is_egress_allowed(policies, party, 5432, None)}
    assert outside == {"api", "reconciler"}


def test_ingress_from_other_namespaces_requires_overlay_rule() -> None:
    for overlay, expected in (("postgres", set()), ("example", {("gateway", "api", 8000)})):
        policies = list(of_kind(build(OVERLAYS / overlay), "NetworkPolicy").values())
        found = {
            (namespace, party, port)
            for namespace in ("default", "gateway", "kube-system")
            for party in PARTIES
            for port in (8000, 5432, 41234)
            if is_ingress_allowed(policies, party, port, namespace)
        }
        assert found == expected, overlay
