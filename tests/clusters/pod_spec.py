"""What a pod asks for, as container.py takes it: command, environment, user, volumes."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

from tests.clusters.api import Api, ApiError, Object

UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class NotYet(Exception):
    """It refers to what is not there. The pod waits, for the reason that a real kubelet would give."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def volumes(api: Api, pod: Object, folder: Path) -> dict[str, Object]:
    """By name: where each is on this machine, or that it is memory."""
    namespace = pod["metadata"]["namespace"]
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    found = {}
    for volume in pod["spec"].get("volumes") or []:
        at = folder / volume["name"]
        entry: Object = {"source": str(at), "memory": False, "bytes": None}
        if "emptyDir" in volume:
            asked = volume["emptyDir"] or {}
            entry["memory"] = asked.get("medium") == "Memory"
            entry["bytes"] = quantity(asked["sizeLimit"]) if "sizeLimit" in asked else None
            at.mkdir(parents=True, exist_ok=True)
            at.chmod(0o777)
        elif "hostPath" in volume:
            entry["source"] = volume["hostPath"]["path"]
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                os.makedirs(entry["source"], exist_ok=True)
        elif "persistentVolumeClaim" in volume:
            entry["source"] = _claimed(api, namespace, volume["persistentVolumeClaim"]["claimName"])
            if group is not None:
                os.chown(entry["source"], -1, group)
                os.chmod(entry["source"], 0o2775)
        else:
            at.mkdir(parents=True, exist_ok=True)
            for source in volume["projected"]["sources"] if "projected" in volume else [volume]:
                _write(api, pod, source, at)
        if not entry["memory"] and not Path(entry["source"]).exists():
            raise NotYet("ContainerCreating", f'MountVolume.SetUp failed for "{volume["name"]}": no {entry["source"]}')
        found[volume["name"]] = entry
    return found


def _claimed(api: Api, namespace: str, claim: str) -> str:
    bound = api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")["spec"].get("volumeName")
    if not bound:
        raise NotYet("ContainerCreating", f'persistentvolumeclaim "{claim}" is not bound')
    path = api.get(f"/api/v1/persistentvolumes/{bound}")["spec"]["hostPath"]["path"]
    return str(path)


def _write(api: Api, pod: Object, source: Object, at: Path) -> None:
    """A volume whose content the API server has."""
    namespace = pod["metadata"]["namespace"]
    asked: Object
    if "configMap" in source or "secret" in source:
        kind = "configMap" if "configMap" in source else "secret"
        asked = source[kind]
        name = str(asked.get("name") or asked.get("secretName"))
        data = _data(api, namespace, kind, name, asked.get("optional", False))
        chosen = {i["key"]: i["path"] for i in asked["items"]} if "items" in asked else {key: key for key in data}
        for key, path in chosen.items():
            if key not in data:
                raise NotYet("ContainerCreating", f'{kind} "{name}" has no key "{key}"')
            _file(at / path, data[key], asked.get("defaultMode", 0o644))
    elif "serviceAccountToken" in source:
        account = pod["spec"].get("serviceAccountName", "default")
        made = api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", {"spec": {}})
        _file(at / source["serviceAccountToken"]["path"], made["status"]["token"].encode(), 0o644)
    elif "downwardAPI" in source:
        for item in source["downwardAPI"]["items"]:
            _file(at / item["path"], field(pod, item["fieldRef"]["fieldPath"], "", "").encode(), 0o644)
    else:
        raise NotYet("ContainerCreating", f"the test kubelet does not know this volume: {sorted(source)}")


def _file(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def _data(api: Api, namespace: str, kind: str, name: str, optional: bool) -> dict[str, bytes]:
    try:
        found = api.get(f"/api/v1/namespaces/{namespace}/{kind.lower()}s/{name}")
    except ApiError as e:
        if e.status != 404:
            raise
        if optional:
            return {}
        raise NotYet("CreateContainerConfigError", f'{kind.lower()} "{name}" not found') from e
    encoded = found.get("data") or {}
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in encoded.items()}
    plain = {key: str(value).encode() for key, value in encoded.items()}
    return plain | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


def container_spec(
    api: Api, pod: Object, container: Object, mounted: dict[str, Object], image_env: dict[str, str], node: str, ip: str
) -> Object:
    security = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    environment = {**image_env, "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"]}
    environment |= _environment(api, pod, container, node, ip)
    argv = [*(container.get("command") or []), *(container.get("args") or [])]
    uid = security.get("runAsUser", 0)
    if security.get("runAsNonRoot") and uid == 0:
        raise NotYet("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
    gid = security.get("runAsGroup", uid)
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    return {
        "argv": [_expand(text, environment) for text in argv],
        "env": environment,
        "cwd": container.get("workingDir") or "/",
        "uid": uid,
        "gid": gid,
        "groups": [gid] if group is None else [gid, group],
        "read_only": bool(security.get("readOnlyRootFilesystem")),
        "shares_processes": bool(pod["spec"].get("shareProcessNamespace")),
        "no_new_privileges": security.get("allowPrivilegeEscalation") is False,
        "mounts": [_mount(mount, mounted) for mount in container.get("volumeMounts") or []],
    }


def _mount(mount: Object, mounted: dict[str, Object]) -> Object:
    volume = dict(mounted[mount["name"]])
    if "subPath" in mount:
        volume["source"] = str(Path(volume["source"]) / mount["subPath"])
        os.makedirs(volume["source"], exist_ok=True) if not os.path.exists(volume["source"]) else None
    return {**volume, "at": mount["mountPath"], "read_only": mount.get("readOnly", False)}


def _environment(api: Api, pod: Object, container: Object, node: str, ip: str) -> dict[str, str]:
    namespace = pod["metadata"]["namespace"]
    values: dict[str, str] = {}
    for each in container.get("envFrom") or []:
        kind = "secret" if "secretRef" in each else "configMap"
        reference = each[f"{kind}Ref"]
        data = _data(api, namespace, kind, reference["name"], reference.get("optional", False))
        values |= {each.get("prefix", "") + key: value.decode() for key, value in data.items()}
    for each in container.get("env") or []:
        value = _value(api, pod, each, node, ip)
        if value is not None:
            values[each["name"]] = _expand(value, values)
    return values


def _value(api: Api, pod: Object, each: Object, node: str, ip: str) -> str | None:
    source = each.get("valueFrom")
    if source is None:
        return str(each.get("value", ""))
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"], node, ip)
    if "resourceFieldRef" in source:
        raise NotYet("CreateContainerConfigError", "the test kubelet does not know resourceFieldRef")
    kind = "secret" if "secretKeyRef" in source else "configMap"
    reference = source[f"{kind}KeyRef"]
    optional = reference.get("optional", False)
    data = _data(api, pod["metadata"]["namespace"], kind, reference["name"], optional)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if optional:
        return None
    wanted = f"couldn't find key {reference['key']} in {kind} {reference['name']}"
    raise NotYet("CreateContainerConfigError", wanted)


def field(pod: Object, path: str, node: str, ip: str) -> str:
    """The downward API."""
    known = {"spec.nodeName": node, "status.podIP": ip, "status.hostIP": "127.0.0.1"}
    if path in known:
        return known[path]
    inside = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if inside:
        return str((pod["metadata"].get(inside[1]) or {}).get(inside[2], ""))
    found: Any = pod
    for part in path.split("."):
        found = found.get(part, "")
    return str(found)


def _expand(text: str, environment: dict[str, str]) -> str:
    """$(NAME) where NAME is known; $$(NAME) stays."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda m: "$" if m[0] == "$$" else environment.get(m[1], m[0]),
        text,
    )


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit])
