"""A pod's volumes as folders of this machine.

There is no mount namespace, so a container sees them where they really are: mount paths in its
command, arguments and environment are replaced by the folders' paths. A program that has a mount
path built in doesn't find it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from support.kubernetes.container_environment import (
    MissingReferenceError,
    Read,
    contents,
    expand,
    field_of,
)
from support.kubernetes.status import Object


class PathMap:
    """Replaces paths of the container by paths of this machine."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = {path.rstrip("/"): real for path, real in folders.items()}
        longest_first = sorted(self._folders, key=len, reverse=True)
        paths = "|".join(re.escape(path) for path in longest_first) or "(?!)"
        # The path itself or one below it, not the end of another path; but that of a URL.
        self._pattern = re.compile(rf"(?:(?<![\w.\-/])|(?<=://))(?:{paths})(?![\w.\-])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: str(self._folders[found[0]]), text)


class Volumes:
    """Folders of one pod below `folder`. Claims outlive the pod, below `claims`."""

    def __init__(self, folder: Path, claims: Path) -> None:
        self._folder = folder
        self._claims = claims
        self._folders: dict[str, Path] = {}

    async def prepare(self, pod: Object, read: Read) -> None:
        """Make the folders.

        Raises:
            MissingReferenceError: A Secret or ConfigMap isn't there; may be called again.
        """
        for volume in pod["spec"].get("volumes", []):
            try:
                self._folders[volume["name"]] = await self._prepare_one(volume, pod, read)
            except MissingReferenceError as error:
                name = volume["name"]
                message = f'MountVolume.SetUp failed for volume "{name}" : {error}'
                raise MissingReferenceError(message) from error

    async def _prepare_one(self, volume: Object, pod: Object, read: Read) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            folder: Path = self._claims / volume["persistentVolumeClaim"]["claimName"]
        else:
            folder = self._folder / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        for source in sources:
            for path, data in (await _files(source, pod, read)).items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        return folder

    def mounts(self, container: Object, environment: Mapping[str, str]) -> dict[str, Path]:
        """The container's mount paths and what is there."""
        found = {}
        for mount in container.get("volumeMounts", []):
            real = self._folders[mount["name"]]
            below = mount.get("subPath") or expand(mount.get("subPathExpr", ""), environment)
            if below:
                real = real / below
                if not real.exists():
                    real.mkdir(parents=True)
            found[mount["mountPath"]] = real
        return found

    def remove(self) -> None:
        """Delete what belongs to the pod."""
        shutil.rmtree(self._folder, ignore_errors=True)


async def _files(source: Object, pod: Object, read: Read) -> dict[str, bytes]:
    for field, plural, key in (
        ("secret", "secrets", "secretName"),
        ("configMap", "configmaps", "name"),
    ):
        if field in source:
            wanted = source[field]
            name = wanted.get(key) or wanted["name"]  # projected Secrets have a name
            optional = wanted.get("optional", False)
            return _selected(await contents(read, plural, name, optional), wanted, name, optional)
    if "downwardAPI" in source:
        items = source["downwardAPI"].get("items", [])
        return {
            each["path"]: field_of(pod, each["fieldRef"]["fieldPath"]).encode()
            for each in items
            if "fieldRef" in each
        }
    if "serviceAccountToken" in source:
        return {source["serviceAccountToken"]["path"]: b"no token of any API server"}
    return {}


def _selected(
    entries: dict[str, bytes], wanted: Object, name: str, optional: bool
) -> dict[str, bytes]:
    """The entries as files: all by their keys, or those that `items` names."""
    if not wanted.get("items"):
        return entries
    files = {}
    for item in wanted["items"]:
        if item["key"] in entries:
            files[item["path"]] = entries[item["key"]]
        elif not optional:
            raise MissingReferenceError(f"references non-existent {name} key: {item['key']}")
    return files
