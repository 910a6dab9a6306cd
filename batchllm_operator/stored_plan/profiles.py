"""Profiles of devices and of chains of replicas, kept in the lake beside the plans."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from batchllm_operator.engine.device_profile import DeviceProfile, profile_key
from batchllm_operator.errors import StorageError
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder

if TYPE_CHECKING:
    from batchllm_operator.runahead.profile import ChainProfile

_log = logging.getLogger(__name__)


_Profile = TypeVar("_Profile", "DeviceProfile", "ChainProfile")


class StoredProfiles:
    """One JSON file for each device, model and way to run it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def find(self, subject: Mapping[str, str]) -> DeviceProfile | None:
        return self._find(DeviceProfile, subject)

    def find_chain(self, subject: Mapping[str, str]) -> ChainProfile | None:
        """The profile of a chain; None if there is no readable one."""
        from batchllm_operator.runahead.profile import ChainProfile

        return self._find(ChainProfile, subject)

    def _find(self, kind: type[_Profile], subject: Mapping[str, str]) -> _Profile | None:
        name = f"{profile_key(subject)}.json"
        try:
            profile = kind.model_validate_json(self._folder.read_bytes(name))
        except FileNotFoundError:
            return None
        except (ValidationError, StorageError) as error:
            _log.warning("%s/%s doesn't count: %s", self._folder.uri, name, type(error).__name__)
            return None
        return profile if profile.subject == dict(subject) else None

    def keep(self, profile: DeviceProfile | ChainProfile) -> None:
        """Store a profile, in place of an earlier one of the same subject."""
        try:
            data = profile.model_dump_json(indent=1).encode()
            self._folder.write_bytes(f"{profile_key(profile.subject)}.json", data)
        except StorageError as error:  # it can be measured again
            _log.warning("the device's profile can't be kept: %s", error)


def profiles_folder(spec: JobSpec) -> Folder:
    return Folder.open(spec.output.staging_folder).child("_batchllm", "profiles")
