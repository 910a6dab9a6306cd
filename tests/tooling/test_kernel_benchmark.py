"""The kernel's benchmark: its gate can fail, its steps are what they say, its last line is JSON."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.benchmark_modules import load
from torch import Tensor

from batchllm_kernels.prefix_attention import (
    AttentionShape,
    Gate,
    SharedPrefix,
    find_shared_prefixes,
    prefix_shared_attention,
)

count_work = load("kernel_work").count_work

SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
CPU = torch.device("cpu")


workloads = load("kernel_workloads")
contenders = load("kernel_contenders")
gate = load("kernel_gate")
targets = load("kernel_targets")


class Attention:
    """A contender that computes with the reference, then does something to its output."""

    name = "candidate"

    def __init__(self, spoil: Callable[[Tensor], None]) -> None:
        self.spoil = spoil

    def prepare(self, step: Any, layers: Sequence[Any]) -> Any:
        [layer] = layers

        def call() -> Tensor:
            layer.out[:] = prefix_shared_attention(
                layer.q,
                layer.k_cache,
                layer.v_cache,
                step.batch,
                step.prefixes,
                scale=SHAPE.head_dim**-0.5,
            )
            self.spoil(layer.out)
            out: Tensor = layer.out
            return out

        return contenders.Prepared([call])


def check(spoil: Callable[[Tensor], None]) -> tuple[list[Any], dict[str, str]]:
    settings = gate.interpreter_settings()[-2:]
    attention: Any = Attention(spoil)
    checked: tuple[list[Any], dict[str, str]] = gate.run_gate(
        [attention], settings, SHAPE, torch.float32, CPU, seed=0
    )
    return checked


def lose_a_row(out: Tensor) -> None:
    out[3] = float("nan")


def scale_a_head(out: Tensor) -> None:
    out[:, 1] *= 1.01


def give_up(out: Tensor) -> None:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("spoil", "num_checks", "reason"),
    [
        (lambda out: None, 2, None),
        (lose_a_row, 2, "error "),
        (scale_a_head, 2, "error "),
        (give_up, 0, "RuntimeError: no such instruction"),  # and is asked no more
    ],
)
def test_the_gate_names_who_is_wrong(
    spoil: Callable[[Tensor], None], num_checks: int, reason: str | None
) -> None:
    checks, unfit = check(spoil)
    assert len(checks) == num_checks and bool(unfit) == (reason is not None)
    assert reason is None or unfit["candidate"].startswith(f"mixed_2_4/32/48/2: {reason}")
    json.dumps(gate.worst_errors(checks), allow_nan=False)


def test_layers_are_poisoned_where_nobody_wrote() -> None:
    setting = gate.interpreter_settings()[0]
    step = workloads.make_step(setting, SHAPE, np.random.default_rng(0), CPU)
    layer = workloads.make_layer(step, torch.float32, poisoned=True)
    for cache in (layer.k_cache, layer.v_cache):
        assert cache.shape == (len(step.written), 16, 2, 64)
        assert torch.equal(cache.isnan().all(dim=(2, 3)), ~step.written)
        assert torch.equal(cache.isnan().any(dim=(2, 3)), ~step.written)
    assert layer.out.isnan().all()


@pytest.mark.parametrize("setting", gate.interpreter_settings(), ids=lambda each: each.name)
def test_a_step_shares_what_its_setting_says(setting: Any) -> None:
    step = workloads.make_step(setting, SHAPE, np.random.default_rng(1), CPU)
    found = find_shared_prefixes(step.batch, SHAPE.block_size, Gate({2: 1}, 10**6))
    lens = step.batch.query_start_loc.diff().tolist()
    # Those who decode and those who prefill are stacked apart.
    wanted = [
        SharedPrefix(alike, prefix.num_tokens)
        for prefix in step.prefixes
        for length in sorted({lens[row] for row in prefix.requests})
        if len(alike := tuple(row for row in prefix.requests if lens[row] == length)) > 1
    ]
    assert found == sorted(wanted, key=lambda prefix: prefix.requests)
    # The slots that are read are as many as the model counts, wherever blocks are shared.
    slots = {
        (int(step.batch.block_table[row, token // 16]), token % 16)
        for row, length in enumerate(step.seq_lens)
        for token in range(length)
    }
    work = count_work(step.groups, SHAPE)
    assert work.unique_kv_bytes == len(slots) * 2 * 2 * 64 * 2
    assert int(step.written.sum()) == len(slots)


def test_targets_are_judged_by_the_rows_that_were_measured() -> None:
    both = [
        workloads.Setting(workloads.DECODE_256, 1024, 256, 16, adjacent=each) for each in (0, 1)
    ]
    measured = [
        (setting, {"speedup_vs_fa3": value, "unique_bandwidth_share": 0.7})
        for setting, value in zip(both, (2.1, 0.9), strict=True)
    ]
    judged = targets.judge(measured, None, "H200")
    found = {one["worst_row"]: one for one in judged if one.get("at_least", 0) >= 1}
    shuffled, adjacent = (found[setting.name] for setting in both)
    assert (shuffled["at_least"], shuffled["met"], shuffled["num_rows"]) == (2.0, True, 1)
    assert shuffled["num_rows_wanted"] > 1
    assert (adjacent["at_least"], adjacent["met"], adjacent["num_rows"]) == (1.0, False, 1)
    [bandwidth] = [one for one in judged if "bandwidth" in one["name"]]
    assert (bandwidth["at_least"], bandwidth["num_rows"], bandwidth["met"]) == (0.65, 2, True)
    unmeasured = [one["met"] for one in judged if not one.get("num_rows")]
    assert set(unmeasured) == {None}


def test_a_lost_row_fails_the_gate_however_large_the_batch() -> None:
    expected = torch.randn(4096, 8, 64, generator=torch.Generator().manual_seed(0))
    out = expected + 1e-3 * torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    assert gate.worst_error(out, expected) < 2e-3
    out[17, 3] = 0
    assert (out - expected).norm() / expected.norm() < 1e-2
    assert gate.worst_error(out, expected) > 0.2
    out[17, 3, 5] = float("nan")
    assert math.isnan(gate.worst_error(out, expected))
