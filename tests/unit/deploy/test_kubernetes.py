"""The manifests of ``deploy/kubernetes`` against the official schemas, the programs, and one another.

No cluster runs them here, and no kustomize: ``tests.support.fake_kustomize`` stands for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service.launchers.registry import load
from ratchet_service.reconciler.launch import build_launch_file
from tests.support.container_commands import options_of
from tests.support.fake_kustomize import Manifest, build, containers, of_kind
from tests.support.network_policies import labels_of

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
SETUP = build(FOLDER / "setup")
OVERLAYS = {path.name: build(path) for path in sorted((FOLDER / "overlays").iterdir())}
DISTINCT = {json.dumps(item, sort_keys=True): item for objects in [SETUP, *OVERLAYS.values()] for item in objects}
VERSIONS = list(dict.fromkeys(version.rpartition(".")[0] for version in all_versions()))[-3:]
README = (FOLDER / "README.md").read_text()
HOME = HomePaths(Path("/var/lib/ratchet"))
SPEC = {
    "name": "small",
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"},
    "world": {"nodes": 2, "device": "cpu"},
    "launcher": {"kind": "kubernetes"},
}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def workloads(objects: list[Manifest]) -> dict[str, Manifest]:
    return {**of_kind(objects, "Deployment"), **of_kind(objects, "StatefulSet")}


def pod_of(workload: Manifest) -> Manifest:
    pod: Manifest = workload["spec"]["template"]
    return pod


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_schemas_of_three_newest_versions(version: str) -> None:
    assert len(VERSIONS) == 3 and len(DISTINCT) > 15
    for item in DISTINCT.values():
        kubernetes_validate.validate(item, version, strict=True)


def test_schema_validation_rejects_misspelt_key() -> None:
    wrong = {**of_kind(SETUP, "Namespace")["ratchet"], "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@every_overlay
def test_deployment_commands_and_ports_match_programs_and_services(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = OVERLAYS[overlay]
    found = {}
    for deployment in of_kind(objects, "Deployment").values():
        (container,) = containers(deployment)
        assert "command" not in container, "the images' own entry point is the command line"
        found[deployment["metadata"]["name"]] = options_of(container["args"], monkeypatch)
    api, reconciler = found["ratchet-api"], found["ratchet-reconciler"]
    assert (api.command, reconciler.command) == ("serve", "reconcile")
    assert api.no_reconciler and api.insecure_http and api.host == "0.0.0.0"
    service = of_kind(objects, "Service")["ratchet-api"]
    (port,) = service["spec"]["ports"]
    assert api.url == f"http://{service['metadata']['name']}:{port['port']}"
    (container,) = containers(of_kind(objects, "Deployment")["ratchet-api"])
    assert [p["containerPort"] for p in container["ports"] if p["name"] == port["targetPort"]] == [api.port]
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"/healthz", "/readyz"}


@every_overlay
def test_manifests_reference_only_existing_objects(overlay: str) -> None:
    objects = [*SETUP, *OVERLAYS[overlay]]
    there = {(o["kind"], o["metadata"]["name"]) for o in objects}
    optional = {("Secret", "ratchet-job-secrets")}
    made_by_hand = {("Secret", "ratchet-database")}
    for workload in workloads(objects).values():
        named = set(_named(pod_of(workload)["spec"]))
        assert named - optional - made_by_hand <= there, workload["metadata"]["name"]
        volumes = {v["name"] for v in pod_of(workload)["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        for container in containers(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for service in of_kind(objects, "Service").values():
        assert [w for w in workloads(objects).values() if _selects(service["spec"]["selector"], pod_of(w))]
    for workload in workloads(objects).values():
        assert _selects(workload["spec"]["selector"]["matchLabels"], pod_of(workload))
    (binding,) = of_kind(objects, "RoleBinding").values()
    subjects = {(s["kind"], s["name"], s["namespace"]) for s in binding["subjects"]}
    assert subjects == {("ServiceAccount", "ratchet-reconciler", "ratchet")}
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in there
    assert {o["metadata"]["namespace"] for o in objects if o["kind"] != "Namespace"} == {"ratchet"}


@every_overlay
def test_kustomize_namespace_change_leaves_no_old_namespace(overlay: str, tmp_path: Path) -> None:
    """As the README says it: the name in ``setup/``, the overlay's ``namespace:`` and the launchers file's."""
    spec = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "train"}
    spec["resources"] = [str(FOLDER / "overlays" / overlay)]  # type: ignore[assignment]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(spec))
    objects = [o for o in build(tmp_path) if o["kind"] != "ConfigMap"]
    assert '"namespace": "ratchet"' not in json.dumps(objects)
    (binding,) = of_kind(objects, "RoleBinding").values()
    assert [s["namespace"] for s in binding["subjects"]] == ["train"]


def _named(pod: Manifest) -> Iterator[tuple[str, str]]:
    if "serviceAccountName" in pod:
        yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in pod["containers"]:
        for variable in container.get("env", []):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]
        for source in container.get("envFrom", []):
            yield "Secret", source["secretRef"]["name"]


def _selects(labels: dict[str, str], pod: Manifest) -> bool:
    return labels.items() <= pod["metadata"]["labels"].items()


@every_overlay
def test_pods_meet_the_restricted_standard_and_only_the_reconciler_has_a_token(overlay: str) -> None:
    assert (
        of_kind(SETUP, "Namespace")["ratchet"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    for name, workload in workloads(OVERLAYS[overlay]).items():
        spec = pod_of(workload)["spec"]
        assert spec["automountServiceAccountToken"] is (name == "ratchet-reconciler")
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"persistentVolumeClaim", "configMap", "emptyDir", "name"}
        assert all(set(volume) <= allowed for volume in spec["volumes"])
        for container in containers(workload):
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"] and context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"} and container["resources"]["limits"]
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "Dockerfile.worker").read_text(), re.MULTILINE)
    for deployment in of_kind(OVERLAYS[overlay], "Deployment").values():
        context = pod_of(deployment)["spec"]["securityContext"]
        assert user == [(str(context["runAsUser"]), str(context["runAsGroup"]))] and context["fsGroup"] == int(
            user[0][1]
        )


# --- what the pages and the launchers file say ---------------------------------------------------------------------------


@every_overlay
def test_launchers_file_plans_valid_job_manifests(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = [*SETUP, *OVERLAYS[overlay]]
    launcher = _launcher(objects, tmp_path, monkeypatch)
    spec = parse_spec(SPEC)
    assert launcher.check(spec)[1] == []
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
    launch = build_launch_file(HOME, "job-000000000001", 1, spec, resolved, (), token="t", desired=Desired.RUN)
    plan = launcher.plan(launch)
    (job,) = [manifest for manifest in plan.request["manifests"] if manifest["kind"] == "Job"]
    pod = job["spec"]["template"]
    assert _selects(labels_of("worker"), pod), "the network policies know it by these labels"
    assert job["metadata"]["namespace"] == "ratchet" and plan.launch.service_url == _url_of_the_api(objects)
    assert set(_named(pod["spec"])) <= {(o["kind"], o["metadata"]["name"]) for o in objects}
    assert ("ServiceAccount", "ratchet-worker") in _named(pod["spec"])
    assert pod["spec"]["containers"][0]["image"].partition(":")[0].endswith("/ratchet-worker")
    assert pod["spec"]["securityContext"]["runAsUser"] == 10001, "who may write into the run directory"


def _launcher(objects: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As the service's pod makes it."""
    file = tmp_path / "launchers.yaml"
    file.write_text(of_kind(objects, "ConfigMap")["ratchet-launchers"]["data"]["launchers.yaml"])
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    monkeypatch.setattr(os, "getgid", lambda: 10001)
    launchers = load(HOME, file)
    assert list(launchers) == ["kubernetes"]
    return launchers["kubernetes"]


def _url_of_the_api(objects: list[Manifest]) -> str:
    (container,) = containers(of_kind(objects, "Deployment")["ratchet-api"])
    url: str = container["args"][container["args"].index("--url") + 1]
    return url


@every_overlay
def test_deployment_env_paths_match_volume_mounts(overlay: str) -> None:
    for deployment in of_kind(OVERLAYS[overlay], "Deployment").values():
        (container,) = containers(deployment)
        variables = {v["name"]: v.get("value") for v in container["env"]}
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert variables["RATCHET_LAUNCHERS"] == f"{mounts['launchers']}/launchers.yaml"
        assert variables["RATCHET_HOME"] == mounts["home"] == str(HOME.home)


def test_readme_secret_has_keys_used_by_manifests() -> None:
    made = set(re.findall(r"--from-literal=(\w+)=", README))
    read = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for item in DISTINCT.values()
        for container in containers(item)
        for variable in container.get("env", [])
        if "valueFrom" in variable
    }
    assert made == read == {"url", "password"}
    database = of_kind(OVERLAYS["postgres"], "Service")["ratchet-database"]
    assert f"@{database['metadata']['name']}/ratchet" in README


def test_manifest_images_have_current_version() -> None:
    texts = [path.read_text() for path in FOLDER.rglob("*") if path.is_file()]
    tags = {tag for text in texts for tag in re.findall(r"ratchet-(?:service|worker):([\d.]+)", text)}
    tags |= {tag for text in texts for tag in re.findall(r'newTag: "(.*)"', text)}
    assert tags == {RATCHET_VERSION}


def test_readme_delete_commands_keep_data_volumes() -> None:
    removed = [FOLDER.parents[1] / path for path in re.findall(r"kubectl delete -k (\S+)", README)]
    assert removed
    for folder in removed:
        gone = {item["kind"] for item in build(folder)}
        assert not gone & {"PersistentVolumeClaim", "Namespace", "Secret"}
    database = of_kind(OVERLAYS["postgres"], "StatefulSet")["ratchet-database"]
    assert database["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"


def test_readme_paths_exist() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == {"setup", "base", "overlays"}
    named = set(re.findall(r"(?<![\w/])deploy/[\w./-]+", README))
    assert named and all((ROOT / name.rstrip(".")).exists() for name in named)


def test_every_manifest_file_is_listed_in_a_kustomization() -> None:
    listed: set[Path] = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        spec: Any = yaml.safe_load(path.read_text())
        files = [*spec["resources"], *(f for g in spec.get("configMapGenerator", []) for f in g["files"])]
        listed |= {(path.parent / name).resolve() for name in files} | {path.resolve()}
    assert {path.resolve() for path in FOLDER.rglob("*.yaml")} <= listed
