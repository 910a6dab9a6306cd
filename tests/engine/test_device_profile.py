"""What follows from timed steps."""

import logging

import pytest
from pydantic import ValidationError

from batchllm_operator.engine.device_profile import (
    DeviceProfile,
    StoredProfiles,
    profile_key,
    step_sizes,
)
from batchllm_operator.storage import Folder

SUBJECT = {"device": "a GPU", "vllm": "1.0"}


def profile(*steps: tuple[int, float]) -> DeviceProfile:
    return DeviceProfile(subject=SUBJECT, steps=steps)


def test_the_chunk_is_the_smallest_step_that_is_about_as_fast_as_any() -> None:
    measured = profile((64, 0.010), (512, 0.012), (2048, 0.032), (4096, 0.060), (8192, 0.120))
    assert measured.chunk_size == 4096  # with 2048, it is 94 % of the tokens per second
    assert profile((64, 0.010), (2048, 0.0301), (8192, 0.120)).chunk_size == 2048


def test_the_cost_of_a_step_fits_what_was_measured() -> None:
    cost = profile((64, 0.006), (4096, 0.051), (8192, 0.101)).step_cost
    assert cost.seconds(8192) == pytest.approx(0.101)
    assert cost.seconds(4096) == pytest.approx(0.051)
    assert cost.seconds(1) == cost.seconds(64) == pytest.approx(0.006)


def test_noise_does_not_make_a_cost_negative() -> None:
    cost = profile((64, 0.05), (4096, 0.04), (8192, 0.03)).step_cost
    assert min(cost.token_s, cost.weights_s, cost.overhead_s) >= 0.0
    assert profile((64, 0.05)).step_cost.seconds(1000) == pytest.approx(0.05)


def test_sizes_end_with_the_largest_step() -> None:
    assert list(step_sizes(300)) == [64, 128, 256, 300]
    assert list(step_sizes(512)) == [64, 128, 256, 512]
    assert list(step_sizes(10)) == [10]


def test_a_key_stands_for_all_of_the_subject_in_any_order() -> None:
    assert profile((64, 0.01)).key == profile_key(dict(reversed(SUBJECT.items())))
    assert profile_key({**SUBJECT, "vllm": "1.1"}) != profile_key(SUBJECT)


@pytest.mark.parametrize(
    "steps",
    [
        ((64, 0.0),),
        ((64, -1.0),),
        ((64, float("nan")),),
        ((0, 1.0),),
        ((128, 0.1), (64, 0.1)),
        ((64, 0.1), (64, 0.1)),
    ],
)
def test_steps_that_cannot_be_are_refused(steps: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValidationError):
        profile(*steps)


PROFILE = profile((64, 0.01))


def test_a_profile_is_found_by_its_subject(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("profiles")
    assert StoredProfiles(folder).find(DeviceProfile, PROFILE.subject) is None
    StoredProfiles(folder).keep(PROFILE)
    assert StoredProfiles(folder).find(DeviceProfile, PROFILE.subject) == PROFILE
    assert StoredProfiles(folder).find(DeviceProfile, {"device": "another"}) is None


def test_a_damaged_profile_is_measured_again(
    lake_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder.open(lake_uri).child("profiles")
    StoredProfiles(folder).keep(PROFILE)
    folder.write_bytes(f"{PROFILE.key}.json", b'{"profile_version": 2}')
    with caplog.at_level(logging.WARNING):
        assert StoredProfiles(folder).find(DeviceProfile, PROFILE.subject) is None
    assert "doesn't count" in caplog.text
