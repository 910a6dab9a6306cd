"""Settings by architecture: what ships is sound, and what isn't is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from batchllm_kernels.prefix_attention import UnsupportedError, load_config
from batchllm_kernels.prefix_attention.batch import HEAD_DIMS
from batchllm_kernels.prefix_attention.config import (
    ARCHITECTURES,
    CPU,
    KV_BITS,
    config_file,
    detect_arch,
    parse_config,
)

ALL = [*ARCHITECTURES, CPU]


@pytest.mark.parametrize("arch", ALL)
def test_every_head_size_has_settings(arch: str) -> None:
    config = load_config(arch)
    assert config.arch == arch
    assert set(config.launch) == {(dim, bits) for dim in HEAD_DIMS for bits in KV_BITS}
    for head_dim in HEAD_DIMS:
        assert config.launch_config(head_dim, 32) is config.launch_config(head_dim, 16)


@pytest.mark.parametrize("arch", ALL)
def test_a_larger_group_never_needs_a_longer_prefix(arch: str) -> None:
    table = load_config(arch).gate.min_prefix_by_degree()
    assert table == sorted(table, reverse=True)
    assert table[2] < 2**30


def test_this_machine() -> None:
    assert detect_arch(torch.device("cpu")) == CPU


def test_architecture_without_settings() -> None:
    with pytest.raises(UnsupportedError, match="sm70; there are sm80, sm90"):
        load_config("sm70")


def test_head_size_without_settings() -> None:
    with pytest.raises(UnsupportedError, match="sm90 has no settings for head_dim 80"):
        load_config("sm90").launch_config(80, 16)


def drop(given: dict[str, Any], *path: Any) -> None:
    for key in path[:-1]:
        given = given[key]
    del given[path[-1]]


def put(given: dict[str, Any], value: Any, *path: Any) -> None:
    for key in path[:-1]:
        given = given[key]
    given[path[-1]] = value


@pytest.mark.parametrize(
    "path",
    [("gate",), ("gate", "max_member_tokens"), ("split",), ("launch", 0, "wide"), ("tuned_on",)],
)
def test_missing_values(path: tuple[Any, ...]) -> None:
    given = json.loads(config_file("sm90").read_text())
    drop(given, *path)
    with pytest.raises(ValueError, match=f"settings of sm90.*{path[-1]}"):
        parse_config(given)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (24, ("launch", 0, "narrow", "block_m")),
        (8, ("launch", 0, "wide", "block_n")),
        (0, ("launch", 0, "wide", "num_stages")),
        (128, ("launch", 0, "narrow", "block_m")),
        (3, ("launch", 0, "num_warps")),
        (0, ("launch", 0, "programs_per_processor")),
        (80, ("launch", 0, "head_dim")),
        (4, ("launch", 0, "kv_bits")),
        (0, ("split", "min_tokens")),
        ({"1": 5}, ("gate", "min_prefix_tokens")),
    ],
)
def test_values_out_of_their_range(value: Any, path: tuple[Any, ...]) -> None:
    given = copy.deepcopy(json.loads(config_file("sm90").read_text()))
    put(given, value, *path)
    with pytest.raises(ValueError, match=r"settings of sm90|gate"):
        parse_config(given)


def test_unknown_values() -> None:
    given = json.loads(config_file("sm90").read_text())
    put(given, 1, "split", "speed")
    with pytest.raises(ValueError, match=r"settings of sm90.*speed"):
        parse_config(given)
