"""What replicas are told: settings and shares as JSON, and where the parts of a prefix lie."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.runahead.plan import (
    KEY,
    ChainLimits,
    ChainSettings,
    RunaheadGroup,
    RunaheadShare,
    prefix_digest,
)

LIMITS = ChainLimits(block_size=32, num_blocks=100, max_step_tokens=512, max_model_len=2048)
SETTINGS: dict[str, Any] = {"rank": 1, "world_size": 3, "store": "file:///tmp/store"}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_settings_and_shares_come_out_as_they_went_in() -> None:
    settings = ChainSettings(1, 3, "file:///tmp/store", layer_timeout_s=2.5)
    config = through_json(settings.to_kv_transfer_config())
    assert ChainSettings.from_extra_config(config["kv_connector_extra_config"]) == settings
    share = RunaheadGroup(7, list(range(96)), (64, 32)).share("fill")
    extra_args = through_json(share.to_extra_args())
    assert RunaheadShare.from_params(extra_args[KEY]) == share


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_other_requests_have_no_share(params: dict[str, Any] | None) -> None:
    assert RunaheadShare.from_params(params) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank": 3}, "rank: must be from 0 to 2"),
        ({"rank": "1"}, "rank: must be an integer"),
        ({"world_size": 1}, "world_size: must be at least 2"),
        ({"store": "tcp://host:1"}, "store: must be file"),
        ({"backend": "gloo"}, "has no backend"),
        ({"layer_timeout_s": 0}, "layer_timeout_s: must be a number above 0"),
        ({"raank": 1}, "has no raank"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        ChainSettings.from_extra_config({**SETTINGS, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split": [64, 0]}, "at least one token"),
        ({"split": ["64", 32]}, "at least one token"),
        ({"part": "all"}, "must be chunk or fill"),
        ({"digest": None}, "digest: must be an integer"),
        ({"rank": 1}, "has no rank"),
    ],
)
def test_wrong_shares_are_refused(change: dict[str, Any], reason: str) -> None:
    share = RunaheadGroup(7, list(range(96)), (64, 32)).share("chunk").to_extra_args()[KEY]
    with pytest.raises(SpecError, match=reason):
        RunaheadShare.from_params({"runahead": {**share["runahead"], **change}})


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ((512, 500), None),
        ((64, 1), None),
        ((544, 32), "chunk 0 of 544 tokens is larger than a step of 512"),
        ((32, 513), "chunk 1 of 513 tokens is larger than a step of 512"),
        ((33, 63), "chunk 0 of 33 tokens doesn't end with a KV block"),
        ((64, 32, 32), "split in 3 chunks for 2 replicas"),
        ((64, 0), "at least one token"),
    ],
)
def test_a_group_is_checked(split: tuple[int, ...], reason: str | None) -> None:
    group = RunaheadGroup(1, [5] * sum(split), split)
    if reason is None:
        group.check(2, LIMITS)
    else:
        with pytest.raises(SpecError, match=reason):
            group.check(2, LIMITS)


def test_a_split_has_to_sum_to_its_prefix() -> None:
    with pytest.raises(SpecError, match="its chunks have 96 tokens, its prefix 97"):
        RunaheadGroup(1, [5] * 97, (64, 32)).check(2, LIMITS)


@given(
    chunks=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    last=st.integers(1, 100),
    block_size=st.sampled_from([16, 32]),
)
def test_parts_tile_a_prefix(chunks: list[int], last: int, block_size: int) -> None:
    split = (*[chunk * block_size for chunk in chunks], last)
    num_tokens = sum(split)
    share = RunaheadShare(1, split, 2, "chunk")
    end = 0
    for rank, chunk in enumerate(split):
        bounds = share.bounds(rank, block_size)
        assert (bounds.begin, bounds.end) == (end, end + chunk)
        end = bounds.end
        assert bounds.whole == num_tokens - num_tokens % block_size
        assert bounds.is_last == (rank == len(split) - 1)
        if not bounds.is_last:
            # What a replica gets back is what the next one returns.
            assert bounds.received == share.bounds(rank + 1, block_size).returned
            assert bounds.end % block_size == 0
    assert end == num_tokens


def test_digests_tell_prefixes_apart() -> None:
    assert prefix_digest([1, 2, 3]) == prefix_digest((1, 2, 3))
    assert prefix_digest([1, 2, 3]) != prefix_digest([1, 2, 4])
    assert prefix_digest([1, 2, 3]) != prefix_digest([1, 2, 3, 0])
    assert 0 <= prefix_digest([1, 2, 3]) < 1 << 63
