"""What the Kubernetes launcher asks for: whole manifests, against the published schemas, and what it refuses before it asks.

The schemas see few faults: ``checks`` holds the rules that only an API server knows. That a server takes the manifests is
shown on a cluster alone (``pytest -m cluster``).
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.json_merge_patch import merge
from ratchet_service.launchers.base import LaunchError
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.api_rules import find_faults, is_quantity
from ratchet_service.launchers.kubernetes.launcher import make
from ratchet_service.launchers.kubernetes.pod_patch import apply
from ratchet_service.launchers.kubernetes.settings import Settings
from tests.support import kube_jobs
from tests.support.kube_faults import SERVER_SEES
from tests.support.kube_jobs import HOME, JOB_ID, SETTINGS, SMALL, WHOLE, launch_of, launcher, site, spec_of

GOLDEN = Path(__file__).parent / "golden"
NEWEST = sorted(
    {tuple(int(n) for n in path.name.split("-")[0][1:].split("."))[:2] for path in
     (Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema").iterdir() if path.name.startswith("v")}
)[-3:]  # fmt: skip
CASES: dict[str, tuple[JobSpec, dict[str, Any]]] = {
    "small": (spec_of(), {}),
    "whole": (spec_of(WHOLE), {"fork": True, "save_seconds": 33.4}),
}


def asked(name: str) -> list[dict[str, Any]]:
    spec, more = CASES[name]
    made = launcher(allow_host_access=True, sub_path_prefix="site/ratchet").plan(launch_of(spec, **more))
    return list(made.request["manifests"])


@pytest.mark.parametrize("name", CASES)
def test_manifests_match_golden_files(name: str) -> None:
    """Re-record with RATCHET_RECORD=1, and read the difference."""
    text = "---\n".join(yaml.safe_dump(m, sort_keys=False, width=120) for m in copy.deepcopy(asked(name)))
    file = GOLDEN / f"kubernetes-{name}.yaml"
    if os.environ.get("RATCHET_RECORD"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_fork_with_own_checkpoint_mounts_source_only_while_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet would create what is missing, in place of a deleted job."""
    monkeypatch.setattr(kube_jobs, "HOME", HomePaths(tmp_path))
    launch = launch_of(spec_of(), fork=True).model_copy(update={"recorded": Base(step=50, attempt=1, digest="d")})
    assert launch.fork is not None
    source = JobPaths(Path(launch.fork.job_root)).checkpoints
    assert str(source) not in str(launcher().plan(launch).request)
    source.mkdir(parents=True)
    assert str(source) in str(launcher().plan(launch).request)


@pytest.mark.parametrize("name", CASES)
def test_stored_spec_with_explicit_defaults_gives_same_manifests(name: str) -> None:
    spec, more = CASES[name]
    stored = JobSpec.model_validate(spec.model_dump(mode="json"))
    made = launcher(allow_host_access=True, sub_path_prefix="site/ratchet").plan(launch_of(stored, **more))
    assert made.request["manifests"] == asked(name)


@pytest.mark.parametrize("version", NEWEST, ids=lambda version: ".".join(map(str, version)))
@pytest.mark.parametrize("name", CASES)
def test_manifests_match_published_schemas(name: str, version: tuple[int, int]) -> None:
    given = launch_of(CASES[name][0])
    secret = manifests.secret_manifest(site(), given, {"WANDB_API_KEY": "k"})
    for manifest in (*asked(name), secret):
        assert manifest is not None
        kubernetes_validate.validate(manifest, ".".join(map(str, version)), strict=True)


def test_schema_validation_rejects_unknown_field() -> None:
    wrong = copy.deepcopy(asked("small"))
    wrong[0]["spec"]["template"]["spec"]["nodeSelectr"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong[0], ".".join(map(str, NEWEST[-1])), strict=True)


def test_job_pod_failure_policy_covers_disruptions_and_reserved_codes() -> None:
    body = asked("small")[0]["spec"]
    disruption, codes = body["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in (disruption, codes)} == {"FailJob"}
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert set(codes["onExitCodes"]["values"]) == set(CAUSE_OF_EXIT_CODE) - {0}
    assert (body["backoffLimit"], body["podReplacementPolicy"]) == (0, "Failed")
    assert body["template"]["spec"]["restartPolicy"] == "Never"


def pod_of(**changes: Any) -> dict[str, Any]:
    """The pod that the small job, so changed, asks for."""
    made = launcher().plan(launch_of(spec_of(**changes)))
    return dict(made.request["manifests"][0]["spec"]["template"]["spec"])


def sizes(pod: dict[str, Any]) -> dict[str, str | None]:
    """Limits of the pod's own directories."""
    return {volume["name"]: volume["emptyDir"].get("sizeLimit") for volume in pod["volumes"] if "emptyDir" in volume}


def test_pod_has_disk_and_memory_requests_and_limits() -> None:
    pod = pod_of(world={"ranks_per_node": 2}, volumes=[{"mount_path": "/scratch", "empty_dir": "1Gi"}])
    resources = pod["containers"][0]["resources"]
    assert sizes(pod) == {"shm": "8Gi", "tmp": "10Gi", "volume-0": "1Gi"}
    assert resources["requests"] == {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "1Gi"}
    assert resources["limits"] == {"ephemeral-storage": "12288Mi"}, "/tmp, /scratch and logs"
    given = pod_of(resources={"memory": "3Gi"}, launcher={"tmp_size": "500Mi"})
    assert sizes(given) == {"shm": "3Gi", "tmp": "500Mi"}
    assert given["containers"][0]["resources"]["limits"] == {"ephemeral-storage": "1524Mi", "memory": "3Gi"}
    assert sizes(pod_of(resources={"memory": "3Gi"}, launcher={"shm_size": "1Gi"}))["shm"] == "1Gi"
    for size, limits in ({"sizeLimit": "200Gi"}, {"ephemeral-storage": "216064Mi"}), ({}, {}):
        own = {"name": "own", "emptyDir": size}
        patched = pod_of(launcher={"pod_patch": {"spec": {"volumes": [own]}}})
        assert patched["containers"][0]["resources"]["limits"] == limits, size


def test_pods_have_topology_spread_unless_job_sets_one() -> None:
    assert "topologySpreadConstraints" not in pod_of()
    (own,) = pod_of(world={"nodes": 2})["topologySpreadConstraints"]
    assert (own["topologyKey"], own["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert own["labelSelector"]["matchLabels"]["ratchet.dev/job-id"] == JOB_ID
    assert "topologySpreadConstraints" not in pod_of(world={"nodes": 2}, launcher={"topology_spread": []})
    other = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    (given,) = pod_of(launcher={"topology_spread": [other]})["topologySpreadConstraints"]
    assert given == other | {"labelSelector": own["labelSelector"]}


def test_excluded_nodes_are_in_each_alternative_of_the_required_node_affinity() -> None:
    def affinity_of(**launcher_keys: Any) -> tuple[Any, list[Any]]:
        launch = launch_of(spec_of(launcher=launcher_keys)).model_copy(update={"exclude_nodes": ["pk1", "pk2"]})
        job = launcher().plan(launch).request["manifests"][0]
        for version in NEWEST:
            kubernetes_validate.validate(copy.deepcopy(job), ".".join(map(str, version)), strict=True)
        affinity = job["spec"]["template"]["spec"]["affinity"]
        rule = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return affinity, rule["nodeSelectorTerms"]

    # an API server accepts one value per requirement on a field
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("pk1", "pk2")]
    assert affinity_of()[1] == affinity_of(affinity={"nodeAffinity": None})[1] == [{"matchFields": away}]
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    other = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}
    affinity, terms = affinity_of(affinity=other | {"nodeAffinity": required})
    assert terms == [zone | {"matchFields": away} for zone in zones]
    assert affinity["podAntiAffinity"] == other["podAntiAffinity"]


def test_gpu_job_tolerates_gpu_taints_and_cpu_job_sees_no_gpu() -> None:
    def taints(pod: dict[str, Any]) -> list[str]:
        return [toleration["key"] for toleration in pod["tolerations"] if toleration["effect"] == "NoSchedule"]

    def visible(pod: dict[str, Any]) -> str | None:
        found = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        return found.get("NVIDIA_VISIBLE_DEVICES")

    cpu, gpu = pod_of(), pod_of(resources={"gpu": "nvidia.com/mig-1g.5gb"}, world={"device": "cuda"})
    assert (taints(cpu), visible(cpu)) == ([], "void")
    assert (taints(gpu), visible(gpu)) == (["nvidia.com/mig-1g.5gb", "nvidia.com/gpu"], None)
    own = {"key": "amd.com/gpu", "operator": "Equal", "value": "night", "effect": "NoSchedule"}
    given = pod_of(resources={"gpu": "amd.com/gpu"}, world={"device": "cuda"}, launcher={"tolerations": [own]})
    assert given["tolerations"][0] == own and taints(given) == ["amd.com/gpu"]


def test_termination_grace_follows_save_seconds_up_to_stop_grace() -> None:
    def grace(seconds: float) -> int:
        plan = launcher().plan(launch_of(spec_of(policy={"stop_grace": 100}), save_seconds=seconds))
        return int(plan.request["manifests"][0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])

    assert grace(0.0) == grace(1000.0) == 120
    assert grace(4.0) < grace(8.0) < 120


def test_pod_mounts_own_job_directory_and_inputs_read_only() -> None:
    pod = asked("whole")[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "home"]
    assert [(m["mountPath"], m["subPath"], m.get("readOnly", False)) for m in mounts] == [
        (f"/var/lib/ratchet/jobs/{JOB_ID}", f"site/ratchet/jobs/{JOB_ID}", False),
        ("/var/lib/ratchet/jobs/job-ba9876543210/checkpoints", "site/ratchet/jobs/job-ba9876543210/checkpoints", True),
        ("/var/lib/ratchet/code/" + "5a17" * 16, "site/ratchet/code/" + "5a17" * 16, True),
    ]


def test_plan_shows_secret_references_but_no_values_or_token() -> None:
    made = launcher({"WANDB_API_KEY": "tell-nobody"}).plan(launch_of(spec_of(WHOLE)))
    text = str(made.printable())
    assert "tell-nobody" not in text and "not-shown" not in text
    assert "{'name': 'HF_TOKEN', 'valueFrom': {'secretKeyRef': {'name': 'hugging-face', 'key': 'token'}}}" in text
    assert made.launch.service_url == SETTINGS["url"]
    assert made.launch.code_dir == "/ratchet/code/" + "c0de" * 16


@pytest.mark.parametrize("variable", ["RATCHET_TOKEN", "UNSET"])
def test_submit_with_withheld_or_unset_secret_is_refused(variable: str) -> None:
    made = launcher({"RATCHET_TOKEN": "t"}).plan(launch_of(spec_of(secrets={"KEY": {"from_env": variable}})))
    with pytest.raises(LaunchError, match=f"KEY is read from {variable}"):
        launcher({"RATCHET_TOKEN": "t"}).submit(made)


def test_job_launcher_options_override_site_defaults() -> None:
    defaults = {"queue": "shared", "priority_class": "low", "node_selector": {"pool": "any"}}
    made = launcher(defaults=defaults).plan(launch_of(spec_of(launcher={"queue": "mine"}))).request["manifests"][0]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine" and made["spec"]["suspend"] is True
    pod = made["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("low", {"pool": "any"})


def test_stored_launch_file_gives_same_plan() -> None:
    """As after a crash of the service."""
    made = launcher(defaults={"queue": "shared", "priority_class": "low"})
    plan = made.plan(launch_of(spec_of(launcher={"queue": "mine"})))
    assert made.plan(LaunchFile.model_validate_json(plan.launch.model_dump_json())) == plan


# --- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"claim": None}, "claim"),
        ({"urls": "http://x"}, "urls"),
        ({"url": "ratchet:8000"}, "url"),
        ({"sub_path_prefix": "../other"}, "sub_path_prefix: .*without"),
        ({"defaults": {"qeue": "x"}}, "defaults.qeue"),
        ({"lost_after": "soon"}, "lost_after: .*duration"),
    ],
)
def test_wrong_launcher_setting_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"the settings of the launcher kubernetes: {words}"):
        make(HOME, SETTINGS | given)


def test_every_launcher_setting_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "launchers.md").read_text()
    chapter = page.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in chapter.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(Settings.model_fields)


def test_service_running_as_root_requires_run_as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {key: value for key, value in SETTINGS.items() if key != "run_as_user"}
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(ValueError, match="run_as_user"):
        make(HOME, given)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    made = make(HOME, given).plan(launch_of(spec_of())).request["manifests"][0]
    assert made["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 4711


# --- what only a server sees -------------------------------------------------------------------------------------------


def job() -> dict[str, Any]:
    return copy.deepcopy(asked("whole")[0])


@pytest.mark.parametrize("fault", SERVER_SEES)
def test_manifest_checks_find_faults_only_a_server_would_refuse(fault: str) -> None:
    spoil, where, words = SERVER_SEES[fault]
    made = job()
    assert find_faults(made) == []
    spoil(made)
    found = {"/".join(f.path): f.detail for f in find_faults(made)}
    assert words in found[where]


@pytest.mark.parametrize("text", ["1", "100m", "1.5Gi", "2e3", ".5", "-1", "16Gi"])
def test_valid_quantity_is_accepted(text: str) -> None:
    assert is_quantity(text)


@pytest.mark.parametrize("text", ["", "1GB", "one", "1 Gi", "1.2.3", "Gi", "1gi"])
def test_invalid_quantity_is_refused(text: str) -> None:
    assert not is_quantity(text)


# --- what a spec may not ask for ---------------------------------------------------------------------------------------


def container(**keys: Any) -> dict[str, Any]:
    return {"pod_patch": {"spec": {"containers": [{"name": "agent", **keys}]}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "image": ({"image": "Not An Image"}, "/image", "not an image name"),
    "python": ({"python": "bin/python"}, "/python", "PATH"),
    "gpu": ({"resources": {"gpu": "a100"}}, "/resources/gpu", "nvidia.com/gpu"),
    "no gpu": ({"world": {"device": "cuda"}}, "/resources/gpu", "name the resource"),
    "namespace": ({"launcher": {"namespace": "kube-system"}}, "/launcher/namespace", "ratchet"),
    "user": ({"launcher": {"run_as_user": 1}}, "/launcher/run_as_user", "10001"),
    "label": ({"launcher": {"labels": {"team": "a b"}}}, "/launcher/labels/team", "not a valid label"),
    "our label": ({"launcher": {"labels": {"ratchet.dev/attempt": "9"}}}, "/launcher/labels/ratchet.dev~1attempt", "another"),
    "queue label": (
        {"launcher": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
        "/launcher/labels/kueue.x-k8s.io~1queue-name", "launcher.queue",
    ),
    "annotation": ({"launcher": {"annotations": {"a b": "c"}}}, "/launcher/annotations/a b", "not a valid annotation key"),
    "selector": ({"launcher": {"node_selector": {"pool": "-"}}}, "/launcher/node_selector/pool", "not a valid label"),
    "pull secret": ({"launcher": {"image_pull_secrets": ["A"]}}, "/launcher/image_pull_secrets/0", "Secret"),
    "toleration": (
        {"launcher": {"tolerations": [{"key": "x", "effect": "NoShedule"}]}}, "/launcher/tolerations/0/effect", "NoSchedule",
    ),
    "toleration's key": (
        {"launcher": {"tolerations": [{"key": "x", "efect": "y"}]}}, "/launcher/tolerations/0/efect", "has no efect",
    ),
    "host path": ({"volumes": [{"mount_path": "/d", "host_path": "/d"}]}, "/volumes/0/host_path", "allow_host_access"),
    "home": ({"volumes": [{"mount_path": "/d", "claim": "ratchet-home"}]}, "/volumes/0/claim", "all jobs"),
    "over home": ({"volumes": [{"mount_path": "/var", "claim": "d"}]}, "/volumes/0/mount_path", "would hide"),
    "in home": ({"volumes": [{"mount_path": "/var/lib/ratchet/x", "claim": "d"}]}, "/volumes/0/mount_path", "lies in"),
    "sub path": ({"volumes": [{"mount_path": "/d", "claim": "d", "sub_path": "../x"}]}, "/volumes/0/sub_path", ".."),
    "written map": (
        {"volumes": [{"mount_path": "/d", "config_map": "c", "read_only": False}]}, "/volumes/0/read_only", "config_map",
    ),
    "patched account": (
        {"launcher": {"pod_patch": {"spec": {"serviceAccount": "other"}}}},
        "/launcher/pod_patch/spec/serviceAccount", "launcher.service_account",
    ),
    "patched priority": (
        {"launcher": {"pod_patch": {"spec": {"priority": 7}}}}, "/launcher/pod_patch/spec/priority", "priority_class",
    ),
    "patched probe": (
        {"launcher": container(startupProbe={"exec": {"command": ["true"]}})},
        "/launcher/pod_patch/spec/containers/0/startupProbe", "startup_deadline",
    ),
    "patched restarts": (
        {"launcher": {"pod_patch": {"spec": {"restartPolicy": "OnFailure"}}}},
        "/launcher/pod_patch/spec/restartPolicy", "new attempts",
    ),
    "patched label": (
        {"launcher": {"pod_patch": {"metadata": {"labels": {"ratchet.dev/attempt": "1"}}}}},
        "/launcher/pod_patch/metadata/labels/ratchet.dev~1attempt", "finds its pods",
    ),
    "removed labels": (
        {"launcher": {"pod_patch": {"metadata": {"labels": None}}}}, "/launcher/pod_patch/metadata/labels", "finds its pods",
    ),
    "patched command": (
        {"launcher": container(command=["sh"])}, "/launcher/pod_patch/spec/containers/0/command", "agent's",
    ),
    "patched memory": (
        {"launcher": container(resources={"limits": {"memory": "1Gi"}})},
        "/launcher/pod_patch/spec/containers/0/resources/limits/memory", "resources.memory",
    ),
    "replaced containers": (
        {"launcher": {"pod_patch": {"spec": {"containers": {"agent": {}}}}}}, "/launcher/pod_patch/spec/containers", "list",
    ),
    "second container": (
        {"launcher": {"pod_patch": {"spec": {"containers": [{"name": "proxy", "image": "p"}]}}}},
        "/launcher/pod_patch/spec/containers/0", "initContainers",
    ),
    "our volume": (
        {"launcher": {"pod_patch": {"spec": {"volumes": [{"name": "home", "emptyDir": {}}]}}}},
        "/launcher/pod_patch/spec/volumes/0", "Ratchet's own",
    ),
    "patched home": (
        {"launcher": {"pod_patch": {"spec": {"volumes": [
            {"name": "x", "persistentVolumeClaim": {"claimName": "ratchet-home"}}]}}}},
        "/launcher/pod_patch/spec/volumes", "all jobs",
    ),
    "host network": (
        {"launcher": {"pod_patch": {"spec": {"hostNetwork": True}}}}, "/launcher/pod_patch/spec/hostNetwork", "allow_host_access",
    ),
    "privileged": (
        {"launcher": container(securityContext={"privileged": True})},
        "/launcher/pod_patch/spec/containers/0/securityContext/privileged", "allow_host_access",
    ),
    "patched directory of the node": (
        {"launcher": {"pod_patch": {"spec": {"volumes": [{"name": "volume-7", "hostPath": {"path": "/"}}]}}}},
        "/launcher/pod_patch/spec/volumes", "allow_host_access",
    ),
    "patched token": (
        {"launcher": {"pod_patch": {"spec": {"automountServiceAccountToken": True}}}},
        "/launcher/pod_patch/spec/automountServiceAccountToken", "allow_host_access",
    ),
    "patched system calls": (
        {"launcher": {"pod_patch": {"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}}}},
        "/launcher/pod_patch/spec/securityContext/seccompProfile/type", "confined",
    ),
    "withheld Secret": (
        {"secrets": {"URL": {"from_secret": {"name": "database", "key": "url"}}}}, "/secrets/URL", "reserved for the service",
    ),
    "Secret of another attempt": (
        {"secrets": {"A": {"from_secret": {"name": "job-0123456789ab-a0001", "key": "k"}}}},
        "/secrets/A",
        "reserved for the service",
    ),
    "withheld Secret as files": (
        {"volumes": [{"mount_path": "/d", "secret": "database"}]}, "/volumes/0/secret", "reserved for the service",
    ),
    "withheld account": (
        {"launcher": {"service_account": "reconciler"}}, "/launcher/service_account", "reserved for the service",
    ),
    "withheld Secret for images": (
        {"launcher": {"image_pull_secrets": ["registry", "database"]}}, "/launcher/image_pull_secrets/1",
        "reserved for the service",
    ),
    "withheld Secret by patch": (
        {"launcher": container(envFrom=[{"secretRef": {"name": "database"}}])},
        "/launcher/pod_patch/spec/containers/0/envFrom/0/secretRef/name", "reserved for the service",
    ),
    "patched quantity": (
        {"launcher": container(resources={"requests": {"ephemeral-storage": "1GB"}})},
        "/launcher/pod_patch/spec/containers", "quantity",
    ),
    "patched disk": (
        {"launcher": container(resources={"limits": {"ephemeral-storage": "1Ti"}})},
        "/launcher/pod_patch/spec/containers/0/resources/limits/ephemeral-storage", "launcher.tmp_size",
    ),
    "patched affinity": (
        {"launcher": {"pod_patch": {"spec": {"affinity": {}}}}}, "/launcher/pod_patch/spec/affinity", "launcher.affinity",
    ),
    "patched spread": (
        {"launcher": {"pod_patch": {"spec": {"topologySpreadConstraints": []}}}},
        "/launcher/pod_patch/spec/topologySpreadConstraints", "launcher.topology_spread",
    ),
    "spread": (
        {"launcher": {"topology_spread": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "Never"}]}},
        "/launcher/topology_spread/0/whenUnsatisfiable", "ScheduleAnyway",
    ),
    "topology of no queue": (
        {"launcher": {"queue_topology": {"preferred": "rack"}}}, "/launcher/queue_topology", "launcher.queue",
    ),
    "priority of no queue": ({"launcher": {"queue_priority": "high"}}, "/launcher/queue_priority", "launcher.queue"),
    "topology's label": (
        {"launcher": {"queue": "q", "queue_topology": {"preferred": "my rack"}}}, "/launcher/queue_topology/preferred",
        "not a valid label key",
    ),
    "topology by annotation": (
        {"launcher": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}},
        "/launcher/annotations/kueue.x-k8s.io~1podset-required-topology", "launcher.queue_topology",
    ),
    "patched DNS": (
        {"launcher": {"pod_patch": {"spec": {"dnsPolicy": "Cluster"}}}}, "/launcher/pod_patch/spec/dnsPolicy", "ClusterFirst",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_spec_is_refused_with_pointer_and_advice(case: str) -> None:
    changes, pointer, words = REFUSED[case]
    _, problems = launcher(withheld=["database", "reconciler"]).check(spec_of(SMALL, **changes))
    assert [problem.pointer for problem in problems] == [pointer]
    assert words in problems[0].detail and problems[0].code == "launcher-cannot"


WEAKENED: dict[str, tuple[dict[str, Any], str, str]] = {
    "token": ({"automountServiceAccountToken": None}, "/automountServiceAccountToken", "no token"),
    "system calls": ({"securityContext": {"seccompProfile": None}}, "/securityContext/seccompProfile", "confined"),
    "root": ({"securityContext": {"runAsNonRoot": None}}, "/securityContext/runAsNonRoot", "as root"),
    "no group": ({"securityContext": {"runAsGroup": None}}, "/securityContext/runAsGroup", "group root"),
    "group root": ({"securityContext": {"runAsGroup": 0}}, "/securityContext/runAsGroup", "group root"),
    "volumes' group root": ({"securityContext": {"fsGroup": 0}}, "/securityContext/fsGroup", "group root"),
    "further group root": (
        {"securityContext": {"supplementalGroups": [7, 0]}}, "/securityContext/supplementalGroups", "group root",
    ),
    "null among further groups": (
        {"securityContext": {"supplementalGroups": [None]}}, "/securityContext/supplementalGroups", "group root",
    ),
    "context": ({"containers": [{"name": "agent", "securityContext": None}]}, "/containers", "agent: its securityContext"),
    "escalation": (
        {"containers": [{"name": "agent", "securityContext": {"allowPrivilegeEscalation": None}}]},
        "/containers", "allowPrivilegeEscalation",
    ),
    "capabilities": (
        {"containers": [{"name": "agent", "securityContext": {"capabilities": None}}]}, "/containers", "drop: [ALL]",
    ),
    "kept capabilities": (
        {"containers": [{"name": "agent", "securityContext": {"capabilities": {"drop": ["NET_RAW"]}}}]},
        "/containers", "drop: [ALL]",
    ),
    "group of one container": (
        {"containers": [{"name": "agent", "securityContext": {"runAsGroup": 0}}]}, "/containers", "agent, runAsGroup",
    ),
    "added container": (
        {"initContainers": [{"name": "log", "image": "l", "securityContext": {"capabilities": {"drop": []}}}]},
        "/initContainers", "log: its securityContext",
    ),
    "system calls of an added container": (
        {"initContainers": [{"name": "log", "image": "l", "securityContext": {"seccompProfile": {}}}]},
        "/initContainers", "log, seccompProfile",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WEAKENED)
def test_patch_that_removes_a_restriction_of_pods_is_refused_unless_the_site_allows_it(case: str) -> None:
    patch, pointer, words = WEAKENED[case]
    spec = spec_of(SMALL, launcher={"pod_patch": {"spec": patch}})
    _, problems = launcher().check(spec)
    assert [problem.pointer for problem in problems] == [f"/launcher/pod_patch/spec{pointer}"]
    assert words in problems[0].detail and "allow_host_access" in problems[0].detail
    assert launcher(allow_host_access=True).check(spec)[1] == []


def test_added_container_gets_the_restrictions_of_the_agents_unless_the_site_allows_others() -> None:
    given = [
        {"name": "plain", "image": "p"},
        {"name": "null", "image": "n", "securityContext": None},
        {"name": "own", "image": "o", "securityContext": {"runAsUser": 7, "capabilities": {"drop": ["ALL", "KILL"]}}},
    ]
    spec = spec_of(SMALL, launcher={"pod_patch": {"spec": {"initContainers": given}}})
    assert launcher().check(spec)[1] == []

    def contexts(**settings: Any) -> list[Any]:
        made = launcher(**settings).plan(launch_of(spec)).request["manifests"][0]["spec"]["template"]["spec"]
        return [container.get("securityContext") for container in made["initContainers"]]

    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert contexts() == [own, own, own | {"runAsUser": 7, "capabilities": {"drop": ["ALL", "KILL"]}}]
    assert contexts(allow_host_access=True) == [None, None, {"runAsUser": 7, "capabilities": {"drop": ["ALL", "KILL"]}}]


def test_capabilities_that_an_added_container_drops_are_dropped_besides_all() -> None:
    drops = [["NET_RAW"], ["all"], ["NET_RAW", "All"]]
    given = [
        {"name": f"log-{i}", "image": "l", "securityContext": {"capabilities": {"drop": drop}}}
        for i, drop in enumerate(drops)
    ]
    spec = spec_of(SMALL, launcher={"pod_patch": {"spec": {"initContainers": given}}})
    assert launcher().check(spec)[1] == []
    made = launcher().plan(launch_of(spec)).request["manifests"][0]["spec"]["template"]["spec"]["initContainers"]
    dropped = [container["securityContext"]["capabilities"]["drop"] for container in made]
    assert dropped == [["NET_RAW", "ALL"], ["all"], ["NET_RAW", "All"]]
    agent = {"containers": [{"name": "agent", "securityContext": {"capabilities": {"drop": ["all"]}}}]}
    assert launcher().check(spec_of(SMALL, launcher={"pod_patch": {"spec": agent}}))[1] == []


def test_refusal_of_another_user_claims_no_owner_of_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is not root leaves the files to its own user, here 4711, whatever user the pods run as."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    _, (problem,) = launcher().check(spec_of(launcher={"run_as_user": 4711}))
    assert problem.pointer == "/launcher/run_as_user"
    assert problem.detail.startswith("pods of this service run as user 10001") and "belong" not in problem.detail


def test_withheld_names_in_the_sites_own_defaults_are_not_refused() -> None:
    defaults = {"image_pull_secrets": ["registry"], "service_account": "pods"}
    assert launcher(withheld=["registry", "pods"], defaults=defaults).check(spec_of(SMALL))[1] == []


@pytest.mark.parametrize(
    "source",
    [
        {"csi": {"driver": "nfs.csi.k8s.io", "volumeAttributes": {"protocol": "nfs", "dnsPolicy": "x"}}},
        {"flexVolume": {"driver": "example.com/nfs", "options": {"protocol": "nfs", "restartPolicy": "x"}}},
    ],
    ids=["csi", "flexVolume"],
)
def test_free_options_of_a_volumes_driver_are_not_checked_as_enumerations(source: dict[str, Any]) -> None:
    patch = {"spec": {"volumes": [{"name": "more"} | source]}}
    assert launcher().check(spec_of(SMALL, launcher={"pod_patch": patch}))[1] == []


def test_a_job_without_any_image_is_refused() -> None:
    _, problems = launcher(image=None).check(spec_of())
    assert [problem.pointer for problem in problems] == ["/image"]


@pytest.mark.parametrize("base", [SMALL, WHOLE], ids=["small", "whole"])
def test_supported_spec_is_not_refused(base: dict[str, Any]) -> None:
    assert launcher(allow_host_access=True).check(spec_of(base))[1] == []


def test_missing_memory_or_shm_size_above_memory_is_warned() -> None:
    warnings, _ = launcher().check(spec_of())
    assert [warning.pointer for warning in warnings] == ["/resources/memory"]
    warnings, _ = launcher().check(spec_of(resources={"memory": "1Gi"}, launcher={"shm_size": "2Gi"}))
    assert [warning.pointer for warning in warnings] == ["/launcher/shm_size"]


# --- the patch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patches_are_those_of_rfc_7396(target: Any, patch: Any, result: Any) -> None:
    """Cases of its appendix A."""
    before = copy.deepcopy(target)
    assert merge(target, patch) == result
    assert target == before


def test_pod_patch_extends_agent_container_and_adds_containers() -> None:
    template = manifests.pod_template(site(), launch_of(spec_of()))
    given = {
        "spec": {
            "containers": [{"name": "agent", "resources": {"limits": {"rdma/hca": "1"}}}],
            "initContainers": [{"name": "log", "image": "fluent-bit", "restartPolicy": "Always"}],
            "volumes": [{"name": "more", "emptyDir": {}}],
        }
    }
    made = apply(template, given)["spec"]
    assert made["containers"][0]["command"] == template["spec"]["containers"][0]["command"]
    resources = template["spec"]["containers"][0]["resources"]
    assert made["containers"][0]["resources"] == resources | {"limits": resources["limits"] | {"rdma/hca": "1"}}
    assert [volume["name"] for volume in made["volumes"]] == ["home", "shm", "tmp", "more"]
    assert made["initContainers"] == given["spec"]["initContainers"]
