"""What NetworkPolicies allow, as far as those of ``deploy/kubernetes`` need it: pods by label, namespaces by name, ports.

No network plug-in runs here: this is the documentation's semantics (policies add up; a pod that one selects is denied the rest).
"""

from __future__ import annotations

from tests.support.fake_kustomize import Manifest

NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


def labels_of(party: str) -> dict[str, str]:
    return {NAME: "elsewhere"} if party == "stranger" else {NAME: "ratchet", COMPONENT: party}


def is_allowed(policies: list[Manifest], source: str, target: str, port: int) -> bool:
    """Within the namespace: the target's ingress and the source's egress must both allow it."""
    return _allowed(policies, "ingress", target, labels_of(source), port) and _allowed(
        policies, "egress", source, labels_of(target), port
    )


def is_ingress_allowed(policies: list[Manifest], target: str, port: int, namespace: str) -> bool:
    """May pods of another namespace come in?"""
    return _allowed(policies, "ingress", target, None, port, namespace)


def is_egress_allowed(policies: list[Manifest], source: str, port: int, namespace: str | None) -> bool:
    """To another namespace; None: to anywhere."""
    return _allowed(policies, "egress", source, None, port, namespace)


def _allowed(
    policies: list[Manifest],
    direction: str,
    party: str,
    peer: dict[str, str] | None,
    port: int,
    namespace: str | None = None,
) -> bool:
    mine = [p["spec"] for p in policies if _matches(p["spec"]["podSelector"], labels_of(party))]
    mine = [spec for spec in mine if direction.capitalize() in spec["policyTypes"]]
    assert mine, "every pod is under the policy that denies"
    rules = [rule for spec in mine for rule in spec.get(direction, [])]
    return any(_rule_allows(rule, direction, peer, port, namespace) for rule in rules)


def _rule_allows(rule: Manifest, direction: str, peer: dict[str, str] | None, port: int, namespace: str | None) -> bool:
    if "ports" in rule and port not in [p["port"] for p in rule["ports"]]:
        return False
    peers = rule.get("from" if direction == "ingress" else "to")
    if peers is None:
        return True
    for selector in peers:
        if "podSelector" in selector and peer is not None and _matches(selector["podSelector"], peer):
            return True
        labels = selector.get("namespaceSelector", {}).get("matchLabels")
        if labels is not None and namespace is not None and labels["kubernetes.io/metadata.name"] == namespace:
            return True
    return False


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(e["operator"] == "In" for e in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(e["key"]) in e["values"] for e in expressions
    )
