"""What a container is started with: command, environment, user, mounts, as its pod says them.

Several nodes are one machine here: every pod has the address 127.0.0.1, and its image is this machine's root directory. Where
the kernel permits it, a container sees of the rest what its volumes show, and a /tmp of its own; else claims must lie where they
are mounted. Only root can start it as the user that its pod names.
"""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kube.store import SECRETS, Object, Store

_REPOSITORY = Path(__file__).parents[3]


class CannotStart(Exception):
    """The container cannot be created: reason, message."""


@dataclass
class Images:
    """What can be pulled: nothing that is in ``missing``; ``first``: a directory that is first on an image's PATH."""

    missing: set[str] = field(default_factory=set)
    first: dict[str, Path] = field(default_factory=dict)


class Orders:
    """``start`` is what ``pod_processes`` is told. ``claims``: directory of each PersistentVolumeClaim."""

    def __init__(self, store: Store, directory: Path, claims: dict[str, Path], images: Images) -> None:
        self._store, self._directory, self._claims, self._images = store, directory, claims, images
        self.isolates = False

    def log_file(self, uid: str) -> Path:
        return self._directory / "logs" / f"{uid}.log"

    def start(self, pod: Object) -> dict[str, Any]:
        """Raises ``CannotStart``."""
        uid, container = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        if pod["spec"].get("initContainers") or len(pod["spec"]["containers"]) != 1:
            raise CannotStart("CreateContainerError", "one container a pod is modelled here")
        first = self._images.first.get(container["image"])
        path = [*([str(first)] if first else []), str(Path(sys.executable).parent), "/usr/bin", "/bin"]
        env = {"PATH": ":".join(path), "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]), "HOME": "/"}
        env |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        for source in container.get("envFrom") or ():
            env |= self._data(pod, source["secretRef"]) if "secretRef" in source else {}
        for variable in container.get("env") or ():
            value = self._value(pod, variable)
            if value is not None:
                env[variable["name"]] = _expand(value, env)
        argv = [_expand(word, env) for word in [*(container.get("command") or ()), *(container.get("args") or ())]]
        if not argv:
            raise CannotStart("CreateContainerError", "no command specified")
        root = self._directory / "roots" / uid
        if self.isolates:
            root.mkdir(parents=True, exist_ok=True)
        security = pod["spec"].get("securityContext", {}) | container.get("securityContext", {})
        if security.get("runAsNonRoot") and security.get("runAsUser", 0) == 0:
            raise CannotStart("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
        return {
            "argv": argv, "env": env, "cwd": container.get("workingDir"), "log": str(self.log_file(uid)),
            "root": str(root) if self.isolates else None, "binds": self._binds(pod, container),
            "user": security.get("runAsUser"), "group": security.get("runAsGroup", security.get("runAsUser")),
        }  # fmt: skip

    def _value(self, pod: Object, variable: Object) -> str | None:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "fieldRef" in source:
            return _field(pod, source["fieldRef"]["fieldPath"])
        if "secretKeyRef" in source:
            asked = source["secretKeyRef"]
            data = self._data(pod, asked)
            if asked["key"] not in data and not asked.get("optional"):
                namespace = pod["metadata"]["namespace"]
                message = f"couldn't find key {asked['key']} in Secret {namespace}/{asked['name']}"
                raise CannotStart("CreateContainerConfigError", message)
            return data.get(asked["key"])
        raise CannotStart("CreateContainerError", f"{sorted(source)} is not modelled here")

    def _data(self, pod: Object, asked: Object) -> dict[str, str]:
        found = self._store.find(SECRETS, pod["metadata"]["namespace"], asked["name"])
        if found is None and not asked.get("optional"):
            raise CannotStart("CreateContainerConfigError", f'secret "{asked["name"]}" not found')
        data = {k: base64.b64decode(v).decode() for k, v in ((found or {}).get("data") or {}).items()}
        return data | ((found or {}).get("stringData") or {})

    def _binds(self, pod: Object, container: Object) -> list[tuple[str, str, bool]]:
        """What is seen where, and whether read-only; outer places first."""
        volumes = {v["name"]: v for v in pod["spec"].get("volumes") or ()}
        out = []
        for mount in container.get("volumeMounts") or ():
            source = self._source(pod, volumes[mount["name"]]) / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            out.append((str(source), mount["mountPath"], bool(mount.get("readOnly"))))
        out.sort(key=lambda bind: len(Path(bind[1]).parts))
        if not self.isolates:
            for source, place, _ in out:
                if place not in ("/tmp", "/dev/shm") and source != place:
                    message = f"{place} would show {source}: no container has mounts of its own on this machine"
                    raise CannotStart("CreateContainerError", message)
            return []
        image = [sys.base_prefix, sys.prefix, str(_REPOSITORY), *map(str, self._images.first.values())]
        return [*out, *((path, path, True) for path in image)]

    def _source(self, pod: Object, volume: Object) -> Path:
        place = self._directory / "volumes" / pod["metadata"]["uid"] / volume["name"]
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "secret" in volume:
            place.mkdir(parents=True, exist_ok=True)
            for key, value in self._data(pod, {"name": volume["secret"]["secretName"]}).items():
                (place / key).write_text(value)
        elif "emptyDir" in volume:
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)
        else:
            raise CannotStart("CreateContainerError", f"the volume {volume['name']} is not modelled here")
        return place


def _field(pod: Object, path: str) -> str:
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    if path in ("status.podIP", "status.hostIP"):
        return "127.0.0.1"
    part, _, key = path.partition(".")
    return str(pod[part].get(key, ""))


def _expand(text: str, env: dict[str, str]) -> str:
    """``$(NAME)`` of a variable that was given before; ``$$`` is a dollar."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), text)
