"""What ``kubectl apply -k FOLDER`` would send, as far as the manifests of ``deploy/kubernetes`` need it. kustomize itself is in
no package registry: this is a stand-in, which refuses every key and every operation that it does not know.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KEYS = {"apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "patches"}


def build(folder: Path) -> list[Manifest]:
    """The objects of a kustomization: its resources and those it includes, then generators, patches, namespace and images; at the
    end accounts that a binding names without a namespace, as kustomize 5.5 has them."""
    objects = _objects(folder)
    accounts = {o["metadata"]["name"]: o["metadata"].get("namespace") for o in objects if o["kind"] == "ServiceAccount"}
    for subject in [s for o in objects if o["kind"] == "RoleBinding" for s in o["subjects"]]:
        account = accounts.get(subject["name"]) if subject["kind"] == "ServiceAccount" else None
        if account is not None:
            subject.setdefault("namespace", account)
    return objects


def _objects(folder: Path) -> list[Manifest]:
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert spec["kind"] == "Kustomization" and set(spec) <= _KEYS, f"{folder}: {set(spec) - _KEYS}"
    objects: list[Manifest] = []
    for name in spec["resources"]:
        path = folder / name
        objects += _objects(path) if path.is_dir() else documents(path)
    for generator in spec.get("configMapGenerator", []):
        _generate(objects, generator, folder)
    for patch in spec.get("patches", []):
        _patch(objects, patch)
    for item in objects:
        if "namespace" in spec and item["kind"] != "Namespace":
            item["metadata"]["namespace"] = spec["namespace"]
    for image in spec.get("images", []):
        _rename(objects, image)
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names), f"{folder}: an object is there twice"
    return objects


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Objects by name."""
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def containers(item: Manifest) -> list[Manifest]:
    """Of a Deployment, StatefulSet or Job; none of anything else."""
    pod = item.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def _generate(objects: list[Manifest], generator: Manifest, folder: Path) -> None:
    assert set(generator) <= {"name", "behavior", "files"}, generator
    data = {name: (folder / name).read_text() for name in generator["files"]}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
    same = [o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == generator["name"]]
    if generator.get("behavior", "create") == "create":
        assert not same, generator
        objects.append(made)
    else:
        assert generator["behavior"] == "replace" and len(same) == 1, generator
        same[0]["data"] = data


def _patch(objects: list[Manifest], patch: Manifest) -> None:
    """JSON patches (RFC 6902) of existing values, on exactly one object."""
    assert set(patch) == {"target", "patch"}, patch
    target = patch["target"]
    group = "/".join(target[key] for key in ("group", "version") if key in target)
    wanted = (group, target["kind"], target["name"])
    (found,) = [o for o in objects if (o["apiVersion"], o["kind"], o["metadata"]["name"]) == wanted]
    for operation in yaml.safe_load(patch["patch"]):
        assert operation["op"] == "replace", operation
        *path, last = operation["path"].strip("/").split("/")
        place: Any = found
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key: Any = int(last) if isinstance(place, list) else last
        assert isinstance(place, list) or key in place, operation
        place[key] = copy.deepcopy(operation["value"])


def _rename(objects: list[Manifest], image: Manifest) -> None:
    assert set(image) <= {"name", "newName", "newTag"}, image
    for item in objects:
        for container in containers(item):
            name, _, tag = (
                container["image"].rpartition(":") if ":" in container["image"] else (container["image"], "", "")
            )
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
