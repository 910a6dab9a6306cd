"""Profiles of devices in the lake."""

from __future__ import annotations

import logging

import pytest

from batchllm_operator.engine.device_profile import DeviceProfile
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.profiles import StoredProfiles

PROFILE = DeviceProfile(subject={"device": "a GPU"}, steps=((64, 0.01),))


def test_a_profile_is_found_by_its_subject(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("profiles")
    assert StoredProfiles(folder).find(PROFILE.subject) is None
    StoredProfiles(folder).keep(PROFILE)
    assert StoredProfiles(folder).find(PROFILE.subject) == PROFILE
    assert StoredProfiles(folder).find({"device": "another"}) is None


def test_a_damaged_profile_is_measured_again(
    lake_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder.open(lake_uri).child("profiles")
    StoredProfiles(folder).keep(PROFILE)
    folder.write_bytes(f"{PROFILE.key}.json", b'{"profile_version": 2}')
    with caplog.at_level(logging.WARNING):
        assert StoredProfiles(folder).find(PROFILE.subject) is None
    assert "doesn't count" in caplog.text
