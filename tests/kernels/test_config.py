"""Settings by architecture: what ships is sound, and what isn't is refused."""

import json
from typing import Any

import pytest
import torch

from batchllm_kernels.prefix_attention import UnsupportedError, load_config
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS
from batchllm_kernels.prefix_attention.config import (
    ARCHITECTURES,
    CPU,
    config_file,
    detect_arch,
    parse_config,
    to_json,
)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, CPU])
def test_what_ships_has_every_head_size_and_round_trips_byte_for_byte(arch: str) -> None:
    config = load_config(arch)
    assert config.arch == arch
    keys = [(launch.head_dim, launch.kv_bits) for launch in config.launch]
    assert sorted(keys) == sorted((dim, bits) for dim in HEAD_DIMS for bits in (8, 16))
    for head_dim in HEAD_DIMS:
        assert config.launch_config(head_dim, 32) is config.launch_config(head_dim, 16)
    assert to_json(config) == config_file(arch).read_text()
    table = config.gate.min_prefix_by_degree()
    assert table == sorted(table, reverse=True), "a larger group never needs a longer prefix"
    assert table[2] < 2**30


def test_what_has_no_settings_is_refused_by_name() -> None:
    assert detect_arch(torch.device("cpu")) == CPU
    with pytest.raises(UnsupportedError, match="sm70; there are sm80, sm90"):
        load_config("sm70")
    with pytest.raises(UnsupportedError, match="sm90 has no settings for head_dim 80"):
        load_config("sm90").launch_config(80, 16)


MISSING = object()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (MISSING, ("gate",)),
        (MISSING, ("gate", "max_member_tokens")),
        (MISSING, ("split",)),
        (MISSING, ("launch", 0, "wide")),
        (MISSING, ("tuned_on",)),
        (24, ("launch", 0, "narrow", "block_m")),
        (8, ("launch", 0, "wide", "block_n")),
        (0, ("launch", 0, "wide", "num_stages")),
        (128, ("launch", 0, "narrow", "block_m")),  # above the wide tiling's
        (3, ("launch", 0, "num_warps")),
        (0, ("launch", 0, "programs_per_processor")),
        (80, ("launch", 0, "head_dim")),
        (4, ("launch", 0, "kv_bits")),
        (0, ("split", "min_tokens")),
        ({"1": 5}, ("gate", "min_prefix_tokens")),
        (1, ("split", "speed")),
    ],
)
def test_a_value_that_is_missing_unknown_or_out_of_its_range_is_named(
    value: Any, path: tuple[Any, ...]
) -> None:
    given = json.loads(config_file("sm90").read_text())
    place = given
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=rf"settings in a\.json: .*{path[0]}"):
        parse_config(json.dumps(given), source="a.json")
