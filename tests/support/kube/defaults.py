"""What an API server fills in, and the pod that a Job controller makes of a template."""

from __future__ import annotations

import copy
import random
import uuid

from tests.support.kube.store import Object

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"


def fill_job(job: Object) -> None:
    """Defaults, selector and labels of a new Job, in place."""
    spec, name = job["spec"], job["metadata"]["name"]
    uid = job["metadata"].setdefault("uid", str(uuid.uuid4()))
    job["metadata"]["generation"] = 1
    job["status"] = {}
    parallelism = spec.setdefault("parallelism", 1)
    spec.setdefault("completions", parallelism)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        for condition in rule.get("onPodConditions") or ():
            condition.setdefault("status", "True")
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    for key, value in (("controller-uid", uid), ("job-name", name)):
        labels |= {key: value, f"batch.kubernetes.io/{key}": value}
    _fill_pod(spec["template"]["spec"])


def _fill_pod(pod: Object) -> None:
    pod.setdefault("terminationGracePeriodSeconds", 30)
    pod.setdefault("dnsPolicy", "ClusterFirst")
    pod.setdefault("securityContext", {})
    pod.setdefault("schedulerName", "default-scheduler")
    if "serviceAccountName" in pod:
        pod["serviceAccount"] = pod["serviceAccountName"]
    for container in pod["containers"]:
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        newest = container["image"].endswith(":latest") or ":" not in container["image"].rpartition("/")[2]
        container.setdefault("imagePullPolicy", "Always" if newest else "IfNotPresent")
        for variable in container.get("env", ()):
            if "fieldRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")


def pod_of(job: Object, index: int) -> Object:
    """A new pod for one completion index."""
    name, template = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
    suffix = "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
    metadata = {
        "name": f"{name}-{index}-{suffix}",
        "generateName": f"{name}-{index}-",
        "generation": 1,
        "labels": template["metadata"]["labels"] | {INDEX: str(index)},
        "annotations": (template["metadata"].get("annotations") or {}) | {INDEX: str(index)},
        "ownerReferences": [
            {
                "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
        "finalizers": [TRACKING],
    }  # fmt: skip
    spec = template["spec"] | {"hostname": f"{name}-{index}", "priority": 0, "enableServiceLinks": True}
    spec["preemptionPolicy"] = "PreemptLowerPriority"
    spec["tolerations"] = [*spec.get("tolerations", ()), *(_tolerated(key) for key in ("not-ready", "unreachable"))]
    for container in spec["containers"]:
        index_of_label = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}
        container.setdefault("env", []).append(
            {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": index_of_label}}
        )
        resources = container["resources"]
        if resources.get("limits"):
            resources["requests"] = resources["limits"] | resources.get("requests", {})
    guaranteed = all(c["resources"].get("limits") == c["resources"].get("requests") != None for c in spec["containers"])  # noqa: E711
    status = {"phase": "Pending", "qosClass": "Guaranteed" if guaranteed else "Burstable"}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status}


def _tolerated(what: str) -> Object:
    key = f"node.kubernetes.io/{what}"
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
