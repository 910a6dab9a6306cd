"""Profiles of devices, kept in the lake beside the plans."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydantic import ValidationError

from batchllm_operator.engine.device_profile import DeviceProfile, profile_key
from batchllm_operator.errors import StorageError
from batchllm_operator.lake import Folder
from batchllm_operator.spec import JobSpec

_log = logging.getLogger(__name__)


class StoredProfiles:
    """One JSON file for each device, model and way to run it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def find(self, subject: Mapping[str, str]) -> DeviceProfile | None:
        name = _file_name(profile_key(subject))
        try:
            profile = DeviceProfile.model_validate_json(self._folder.read_bytes(name))
        except FileNotFoundError:
            return None
        except (ValidationError, StorageError) as error:
            _log.warning("%s/%s doesn't count: %s", self._folder.uri, name, type(error).__name__)
            return None
        return profile if profile.subject == dict(subject) else None

    def keep(self, profile: DeviceProfile) -> None:
        name = _file_name(profile.key)
        try:
            self._folder.write_bytes(name, profile.model_dump_json(indent=1).encode())
        except StorageError as error:  # it can be measured again
            _log.warning("the device's profile can't be kept: %s", error)


def profiles_folder(spec: JobSpec) -> Folder:
    """Where profiles lie, for all jobs that keep their plans there."""
    return Folder.open(spec.output.staging_folder).child("_batchllm", "profiles")


def _file_name(key: str) -> str:
    return f"{key}.json"
