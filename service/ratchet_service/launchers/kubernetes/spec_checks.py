"""Checks a job's spec for parts that Kubernetes cannot honour or that the site does not allow, before the job is accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.launcher import KubernetesLauncherSpec
from ratchet_contract.spec.types import size_in_bytes
from ratchet_service.launchers.kubernetes import api_rules, manifests, pod_patch
from ratchet_service.launchers.kubernetes.pod_patch import json_pointer
from ratchet_service.launchers.kubernetes.settings import Site
from ratchet_service.launchers.kubernetes.volumes import CODE, SHM, TMP

_CODE: Final = "launcher-cannot"
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY: Final = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_IMAGE: Final = re.compile(
    r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?"
    r"(@sha256:[0-9a-f]{64})?"
)
_RESERVED: Final = ("ratchet.dev/", "app.kubernetes.io/", "batch.kubernetes.io/", "kubernetes.io/")
_PRIVILEGES: Final = (
    "automountServiceAccountToken",
    "procMount",
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "privileged",
    "allowPrivilegeEscalation",
    "hostPort",
)
_RESTRICTIONS: Final = {
    "runAsNonRoot": "pods do not run as root",
    "runAsGroup": "pods do not have the group root",
    "fsGroup": "pods do not have the group root",
    "supplementalGroups": "pods do not have the group root",
    "seccompProfile": "system calls are confined",
}
"""Keys of the pod's security context, some of which containers may override -> what their values ensure."""
_LAUNCHER_KEYS: Final = {manifests.QUEUE: "queue", manifests.QUEUE_PRIORITY: "queue_priority"} | dict.fromkeys(
    manifests.QUEUE_TOPOLOGY.values(), "queue_topology"
)
_POD_SPEC_KEYS: Final = {
    "tolerations": "tolerations", "affinity": "affinity", "topologySpreadConstraints": "topology_spread",
}  # fmt: skip
"""Parts of the pod's spec -> keys of ``launcher``."""
_NO_JOB: Final = "job-000000000000"


def check(site: Site, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
    """Return warnings about ``spec``, and problems: parts that this site cannot run or does not allow. Contacts no cluster."""
    launcher = site.effective_launcher(spec)
    found = [*_check_spec(site, spec, launcher), *_check_launcher(site, launcher), *_check_volumes(site, spec)]
    found += _check_withheld_names(site, spec, launcher)
    if site.image(spec) is not None:
        found += _check_manifest(site, spec, launcher, has_other_faults=bool(found))
    return list(_warnings(spec, launcher)), [FieldProblem(pointer=p, code=_CODE, detail=d) for p, d in found]


def _check_spec(site: Site, spec: JobSpec, launcher: KubernetesLauncherSpec) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) of faults in image, interpreter, GPUs and user."""
    image, gpu = site.image(spec), spec.resources.gpu
    if image is None:
        yield (
            "/image",
            "pods need an image: name one with ratchet-train[worker], or have a default set in the launchers file",
        )
    elif _IMAGE.fullmatch(image) is None:
        yield "/image", f"{image!r} is not an image name like registry.example.com/team/worker:1.2"
    if spec.python is not None and "/" in spec.python and not spec.python.startswith("/"):
        yield (
            "/python",
            f"{spec.python!r} is relative: name a program on the image's PATH, or give an absolute path in it",
        )
    if gpu is not None and "/" not in gpu:
        yield (
            "/resources/gpu",
            f"{gpu!r} is not a resource: on Kubernetes a GPU resource has a domain, like nvidia.com/gpu",
        )
    if gpu is None and spec.world.device == "cuda":
        yield "/resources/gpu", "device is cuda, but no GPU is requested: name the resource, like nvidia.com/gpu"
    if launcher.run_as_user is not None and launcher.run_as_user != site.user:
        text = f"pods of this service run as user {site.user}, and a job cannot name another one: remove it"
        yield "/launcher/run_as_user", text


def _check_launcher(site: Site, launcher: KubernetesLauncherSpec) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) of faults in some keys under ``launcher``, such as ``namespace`` and ``labels``."""
    if launcher.namespace is not None and launcher.namespace not in site.namespaces:
        text = (
            f"this service runs jobs in {', '.join(site.namespaces)}; its launchers file (namespaces) may name others"
        )
        yield "/launcher/namespace", text
    for where, labels in (("labels", launcher.labels), ("node_selector", launcher.node_selector)):
        for key, value in labels.items():
            if _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
                text = (
                    f"{key}={value} is not a valid label: letters, digits, '-', '_' and '.', at most 63 characters each"
                )
                yield json_pointer("launcher", where, key), text
    for where, given in (("labels", launcher.labels), ("annotations", launcher.annotations)):
        for key in given:
            if key.startswith(_RESERVED) or key in ("job-name", "controller-uid"):
                yield (
                    json_pointer("launcher", where, key),
                    f"{key} is reserved for Ratchet or Kubernetes: use another key",
                )
            elif key in _LAUNCHER_KEYS:
                yield json_pointer("launcher", where, key), f"use launcher.{_LAUNCHER_KEYS[key]}"
            elif where == "annotations" and _LABEL_KEY.fullmatch(key) is None:
                yield json_pointer("launcher", where, key), f"{key!r} is not a valid annotation key"
    for key in ("queue_priority", "queue_topology"):
        if getattr(launcher, key) is not None and launcher.queue is None:
            yield (
                json_pointer("launcher", key),
                "it belongs to Kueue, but the job names no Kueue queue: set launcher.queue",
            )
    for how, label in (launcher.queue_topology or {}).items():
        if _LABEL_KEY.fullmatch(label) is None:
            yield json_pointer("launcher", "queue_topology", how), f"{label!r} is not a valid label key"
    for i, name in enumerate(launcher.image_pull_secrets):
        if _NAME.fullmatch(name) is None:
            yield f"/launcher/image_pull_secrets/{i}", f"{name!r} is not a valid name of a Secret"


def _check_volumes(site: Site, spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) of faults in the job's volumes, such as a mount path that would hide one of Ratchet's."""
    own = (TMP, SHM, CODE, str(site.home.home))
    for i, volume in enumerate(spec.volumes):
        here, at = f"/volumes/{i}", volume.mount_path.rstrip("/") or "/"
        if volume.host_path is not None and not site.settings.allow_host_access:
            text = (
                "this service does not let jobs mount directories of nodes (allow_host_access in its launchers file): "
                "use a claim"
            )
            yield f"{here}/host_path", text
        if volume.claim == site.settings.claim:
            yield f"{here}/claim", f"{volume.claim} is the service's own run directory, with the files of all jobs"
        if volume.source in ("config_map", "secret") and not volume.read_only:
            yield f"{here}/read_only", f"a {volume.source} cannot be written to"
        if volume.sub_path is not None and (volume.sub_path.startswith("/") or ".." in volume.sub_path.split("/")):
            yield f"{here}/sub_path", "must be a path below the source's root, without '..'"
        hidden = next((path for path in own if _is_within(path, at) or path == at), None)
        if hidden is not None:
            yield f"{here}/mount_path", f"{at} would hide {hidden}, which is already mounted: choose another path"
        elif _is_within(at, str(site.home.home)):
            yield f"{here}/mount_path", f"{at} lies in the run directory: choose another path"


def _check_manifest(
    site: Site, spec: JobSpec, launcher: KubernetesLauncherSpec, *, has_other_faults: bool
) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) for each part of the patch that Ratchet refuses. If there is none, yield them for faults in the
    Job as it would be sent, such as privileges. ``has_other_faults``: other checks have found faults; then faults that these may
    have caused are left out."""
    launch = _example_launch(site, spec)
    template = manifests.pod_template(site, launch)
    patch = launcher.pod_patch
    refused = dict(pod_patch.refused_fields(template, patch, spec.resources.gpu))
    yield from ((f"/launcher/pod_patch{where}", detail) for where, detail in refused.items())
    if refused:
        return
    job = manifests.job_manifest(site, launch)
    plain = {fault.path for fault in api_rules.find_faults(_unpatched(job, template))}
    for fault in api_rules.find_faults(job):
        if fault.path not in plain:
            yield _patch_pointer(patch, fault.path), f"{'/'.join(fault.path[2:])}: {fault.detail}"
        elif fault.path[3] in _POD_SPEC_KEYS:
            yield json_pointer("launcher", _POD_SPEC_KEYS[fault.path[3]], *fault.path[4:]), fault.detail
        elif not has_other_faults:
            yield "/launcher", f"{'/'.join(fault.path)}: {fault.detail}"
    own_names = {volume["name"] for volume in template["spec"]["volumes"]}
    pod = job["spec"]["template"]["spec"]
    added = [volume for volume in pod.get("volumes", []) if volume["name"] not in own_names]
    if not site.settings.allow_host_access:
        yield from _check_privileges(pod, added, patch)
    yield from _check_foreign_files(pod, added, site)


def _unpatched(job: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """Return the Job with the pod template ``template``, which has no patch applied."""
    return job | {"spec": job["spec"] | {"template": template}}


def _check_privileges(
    pod: dict[str, Any], added: list[dict[str, Any]], patch: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) for each setting in the patch that requires ``allow_host_access``. If there is none, yield them
    for restrictions that ``pod`` lacks. In both cases, also yield them for volumes in ``added``, which the patch has added, that
    require ``allow_host_access``."""
    may = "it requires allow_host_access in the service's launchers file"
    found = []
    for path, key, value in _walk(patch.get("spec"), ()):
        where = json_pointer("launcher", "pod_patch", "spec", *path, key)
        if key in _PRIVILEGES and value:
            found.append((where, f"{key} reaches beyond the pod: {may}"))
        elif (key == "runAsNonRoot" and value is False) or (key == "runAsUser" and value == 0):
            found.append((where, f"pods do not run as root: {may}"))
        elif key == "type" and value == "Unconfined":
            found.append((where, f"system calls are confined: {may}"))
        elif key == "capabilities" and isinstance(value, dict) and value.get("add"):
            found.append((where, f"capabilities reach beyond the pod: {may}"))
    if not found:
        found += [(_patch_pointer(patch, path), f"{text}: {may}") for path, text in _missing_restrictions(pod)]
    yield from found
    for volume in added:
        if "hostPath" in volume:
            yield "/launcher/pod_patch/spec/volumes", f"{volume['name']} is a directory of the node: {may}"
        elif any("serviceAccountToken" in source for source in (volume.get("projected") or {}).get("sources", ())):
            yield "/launcher/pod_patch/spec/volumes", f"{volume['name']} holds a token of the service account: {may}"


def _missing_restrictions(pod: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path in the Job, message) for the restrictions of token, user, groups, system calls and privileges that ``pod``,
    with the patch applied, lacks."""
    here, context = ("spec", "template", "spec"), pod["securityContext"]
    if pod.get("automountServiceAccountToken") is not False:
        yield (*here, "automountServiceAccountToken"), "pods get no token of the service account"
    lacking = _lacking_keys(context)
    for key in lacking:
        yield (*here, "securityContext", key), _RESTRICTIONS[key]
    for kind in ("containers", "initContainers"):
        for container in pod.get(kind, ()):
            own, name = container.get("securityContext"), container["name"]
            own = own if isinstance(own, dict) else {}
            for key in _lacking_keys(context | own):
                if key not in lacking:
                    yield (*here, kind), f"{name}, {key}: {_RESTRICTIONS[key]}"
            dropped = manifests.dropped_capabilities(own)
            if own.get("allowPrivilegeEscalation") is not False or not manifests.drops_all(dropped):
                text = "its securityContext lacks allowPrivilegeEscalation: false or capabilities: {drop: [ALL]}"
                yield (*here, kind), f"{name}: {text}"


def _lacking_keys(context: dict[str, Any]) -> list[str]:
    """Return the keys of ``_RESTRICTIONS`` whose values in a security context do not restrict the pod."""
    groups, profile = context.get("supplementalGroups", []), context.get("seccompProfile")
    is_restricted = {
        "runAsNonRoot": context.get("runAsNonRoot") is True,
        "runAsGroup": _is_other_group(context.get("runAsGroup")),
        "fsGroup": "fsGroup" not in context or _is_other_group(context["fsGroup"]),
        "supplementalGroups": isinstance(groups, list) and all(_is_other_group(group) for group in groups),
        "seccompProfile": isinstance(profile, dict) and profile.get("type") in ("RuntimeDefault", "Localhost"),
    }
    return [key for key in _RESTRICTIONS if not is_restricted[key]]


def _is_other_group(value: Any) -> bool:
    """True if the value is the id of a group other than root's."""
    return isinstance(value, int) and value > 0


def _check_foreign_files(pod: dict[str, Any], added: list[dict[str, Any]], site: Site) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) for volumes in ``added``, which the patch has added, that use the service's own claim. Also yield
    them for init containers that mount the run directory."""
    for volume in added:
        if (volume.get("persistentVolumeClaim") or {}).get("claimName") == site.settings.claim:
            text = f"{site.settings.claim} is the service's own run directory, with the files of all jobs"
            yield "/launcher/pod_patch/spec/volumes", text
    for i, container in enumerate(pod.get("initContainers") or ()):
        if any(mount.get("name") == "home" for mount in container.get("volumeMounts") or ()):
            text = "only the agent's container sees the run directory"
            yield f"/launcher/pod_patch/spec/initContainers/{i}/volumeMounts", text


_ATTEMPT: Final = re.compile(r"job-[0-9a-z]{12}-a[0-9]{4,}")
"""Names (``attempt_name``) of the Secrets that hold jobs' values."""


def _check_withheld_names(site: Site, spec: JobSpec, launcher: KubernetesLauncherSpec) -> Iterator[tuple[str, str]]:
    """Yield (pointer, message) for each reserved name that the job uses: a name in the setting ``withheld``, or the name of an
    attempt's Secret."""
    used: list[tuple[str, Any]] = []
    used += [
        (f"/secrets/{name}", source.from_secret.name) for name, source in spec.secrets.items() if source.from_secret
    ]
    for i, volume in enumerate(spec.volumes):
        used += [(f"/volumes/{i}/{kind}", getattr(volume, kind)) for kind in ("claim", "config_map", "secret")]
    if "service_account" in spec.launcher.model_fields_set:
        used.append(("/launcher/service_account", launcher.service_account))
    if "image_pull_secrets" in spec.launcher.model_fields_set:
        used += [(f"/launcher/image_pull_secrets/{i}", name) for i, name in enumerate(launcher.image_pull_secrets)]
    used += [
        (json_pointer("launcher", "pod_patch", *path, key), value) for path, key, value in _walk(launcher.pod_patch, ())
    ]
    for where, name in used:
        if isinstance(name, str) and (name in site.settings.withheld or _ATTEMPT.fullmatch(name)):
            yield where, f"{name} is reserved for the service, and no job may use it: use another name"


def _warnings(spec: JobSpec, launcher: KubernetesLauncherSpec) -> Iterator[Warning_]:
    """Yield the warnings of a spec."""
    memory = spec.resources.memory
    if memory is None:
        text = "without it pods have no limit, and are evicted before others when a machine runs short of memory"
        yield Warning_(pointer="/resources/memory", code="no-memory-limit", detail=text)
    elif launcher.shm_size is not None and size_in_bytes(launcher.shm_size) > size_in_bytes(memory):
        text = f"/dev/shm counts as memory of the pod: more than {memory} of it ends the pod as out of memory"
        yield Warning_(pointer="/launcher/shm_size", code="shm-beyond-memory", detail=text)


def _example_launch(site: Site, spec: JobSpec) -> LaunchFile:
    """Return an example launch of the spec, from which its manifests are built for checks; some values are made up."""
    home = HomePaths(site.home.home)
    job = home.job(_NO_JOB)
    return LaunchFile(
        job_id=_NO_JOB,
        attempt=1,
        world_size=spec.world.size,
        ranks=list(range(spec.world.ranks_per_node)),
        spec=spec,
        resolved=Resolved(
            device="cpu",
            backend="gloo",
            threads_per_rank=spec.resources.cpus_per_rank or 1,
            python=spec.python or "python",
        ),
        job_root=str(job.root),
        attempt_dir=str(job.attempt(1).root),
        workdir=str(job.work_dir),
        report_token="",
        service_file=str(home.service_file),
    )


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield (path of the parent, key, value) for every key and list item in JSON data, at all depths."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield path, str(key), item
        yield from _walk(item, (*path, str(key)))


def _patch_pointer(patch: Any, path: tuple[str, ...]) -> str:
    """Return the JSON pointer to the part of the patch that sets ``path`` in the Job, up to the first list."""
    at, out = patch, ["launcher", "pod_patch"]
    for key in path[2:]:
        if not isinstance(at, dict) or key not in at:
            break
        out.append(key)
        at = at[key]
    return json_pointer(*out)


def _is_within(path: str, folder: str) -> bool:
    """True if ``path`` is below ``folder``, by its text alone."""
    return folder == "/" or path.startswith(folder + "/")
