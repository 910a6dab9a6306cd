"""Tunes tilings by successive halving, then the split rule, then the gate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TextIO

from triton.errors import TritonError

from batchllm_kernels.prefix_attention.config import ArchConfig, LaunchConfig, SplitRule
from batchllm_kernels.prefix_attention.grouping import Gate
from batchllm_kernels.tuning.bench import Bench
from batchllm_kernels.tuning.candidates import launch_label
from batchllm_kernels.tuning.selection import choose, faster_half, gate_table, relative_time
from batchllm_kernels.tuning.workloads import (
    Workload,
    gate_workload,
    launch_workloads,
    split_workloads,
)

MAX_ERROR: Final = 1e-2
"""Relative to float32 attention, in bfloat16."""
ROUNDS: Final = (3, 6, 12, 25)
"""Repetitions in each round of halving."""
REPETITIONS: Final = 15
"""For the split rule and the gate."""
GATE_DEGREES: Final = (2, 4, 8, 16, 32)
GATE_PREFIXES: Final = (64, 128, 256, 512, 1024, 2048, 4096)
SPLITS: Final = tuple(
    SplitRule(min_tokens, pieces) for min_tokens in (128, 256, 512) for pieces in (2, 4, 8)
)


class TuningError(RuntimeError):
    """The current settings fail or compute wrong results."""


@dataclass
class Progress:
    """Reports the progress and the remaining time of a search on stderr."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic

    def over(self, what: str, items: Sequence[Any]) -> Iterable[Any]:
        """Iterate over the items, with a line for each."""
        begin = self.clock()
        for done, item in enumerate(items):
            left = (self.clock() - begin) / max(done, 1) * (len(items) - done)
            eta = f", {left:.0f} s left" if done else ""
            print(f"{what}: {done + 1} of {len(items)}{eta}", file=self.stream)
            yield item

    def say(self, line: str) -> None:
        """Write one line."""
        print(line, file=self.stream)


@dataclass
class Tuner:
    """Improves an architecture's settings step by step; `config` is the best so far.

    `raw` keeps every timing behind a choice.
    """

    config: ArchConfig
    progress: Progress = field(default_factory=Progress)
    raw: dict[str, Any] = field(default_factory=dict)

    def tune_launch(
        self,
        head_dim: int,
        kv_bits: int,
        candidates: Sequence[LaunchConfig],
        bench: Bench,
        *,
        budget_s: float,
        workloads: Sequence[Workload] | None = None,
        rounds: Sequence[int] = ROUNDS,
    ) -> LaunchConfig:
        """Replace the settings of one head size by the fastest candidate, if one is faster.

        After `budget_s` seconds nothing more is timed, and the timings so far decide.

        Raises:
            TuningError: the current settings fail or compute wrong results.
        """
        key = head_dim, kv_bits
        name = f"{self.config.arch} {head_dim}/{kv_bits}"
        deadline = self.progress.clock() + budget_s
        launches = {launch_label(one): one for one in (self.config.launch[key], *candidates)}
        current = next(iter(launches))
        workloads = launch_workloads() if workloads is None else workloads
        alive = list(launches)
        measured: dict[str, dict[str, float]] = {}
        for repetitions in rounds:
            configs = {label: self._with_launch(key, launches[label]) for label in alive}
            measured_now = self._measure_until(
                deadline, name, configs, bench, workloads, repetitions, check=not measured
            )
            if len(measured_now) == 1 and measured:
                break  # only the current settings: the previous round says more
            measured = measured_now
            self.raw.setdefault(name, []).append(
                {"repetitions": repetitions, "milliseconds": measured}
            )
            times = {
                label: relative_time(timings, measured[current])
                for label, timings in measured.items()
            }
            # The current settings come first: they are the baseline.
            alive = [current, *(one for one in faster_half(times, [current]) if one != current)]
            if self.progress.clock() > deadline or len(alive) == 1:
                break
        alone = [workload.name for workload in workloads if workload.shares_nothing]
        chosen = launches[choose(measured, current, alone)]
        self.config = self._with_launch(key, chosen)
        self.progress.say(f"{name}: {launch_label(chosen)}")
        return chosen

    def tune_split(
        self,
        bench: Bench,
        *,
        rules: Sequence[SplitRule] = SPLITS,
        workloads: Sequence[Workload] | None = None,
    ) -> SplitRule:
        """Replace the split rule by the fastest one, if one is faster."""
        workloads = split_workloads() if workloads is None else workloads
        by_label = {_split_label(rule): rule for rule in (self.config.split, *rules)}
        current = next(iter(by_label))
        measured: dict[str, Mapping[str, float]] = {}
        for label in self.progress.over(f"{self.config.arch} split rule", list(by_label)):
            config = replace(self.config, split=by_label[label])
            measured[label] = {
                each.name: bench.time(config, each, REPETITIONS) for each in workloads
            }
        self.raw["split"] = measured
        chosen = by_label[choose(measured, current, [])]
        self.config = replace(self.config, split=chosen)
        self.progress.say(f"{self.config.arch}: {chosen}")
        return chosen

    def tune_gate(self, bench: Bench) -> Gate:
        """Replace the gate's lengths by the least ones at which sharing is faster."""
        member_tokens = self.config.gate.max_member_tokens
        opened = replace(self.config, gate=Gate({2: 1}, member_tokens))
        closed = replace(self.config, gate=Gate({}, member_tokens))
        timings: dict[tuple[int, int], tuple[float, float]] = {}
        cases = [(degree, tokens) for degree in GATE_DEGREES for tokens in GATE_PREFIXES]
        for case in self.progress.over(f"{self.config.arch} gate", cases):
            workload = gate_workload(*case)
            shared, apart = (bench.time(each, workload, REPETITIONS) for each in (opened, closed))
            timings[case] = shared, apart
        self.raw["gate"] = [
            {"degree": degree, "prefix": tokens, "shared_ms": shared, "apart_ms": apart}
            for (degree, tokens), (shared, apart) in timings.items()
        ]
        gate = Gate(gate_table(timings), member_tokens)
        self.config = replace(self.config, gate=gate)
        self.progress.say(f"{self.config.arch}: {gate}")
        return gate

    def _with_launch(self, key: tuple[int, int], launch: LaunchConfig) -> ArchConfig:
        return replace(self.config, launch={**self.config.launch, key: launch})

    def _measure_until(
        self,
        deadline: float,
        name: str,
        configs: Mapping[str, ArchConfig],
        bench: Bench,
        workloads: Sequence[Workload],
        repetitions: int,
        *,
        check: bool,
    ) -> dict[str, dict[str, float]]:
        """Milliseconds by label and workload, of the settings that work.

        Raises:
            TuningError: the first, which are in use, don't.
        """
        measured: dict[str, dict[str, float]] = {}
        items = list(configs.items())
        for label, config in self.progress.over(f"{name}, {repetitions} repetitions", items):
            if measured and self.progress.clock() > deadline:
                self.progress.say(f"{name}: out of time, the rest isn't tried")
                break
            timings = self._measure(config, label, bench, workloads, repetitions, check=check)
            if timings is not None:
                measured[label] = timings
            elif not measured:
                raise TuningError(f"{name}: the settings in use ({label}) don't work")
        return measured

    def _measure(
        self,
        config: ArchConfig,
        label: str,
        bench: Bench,
        workloads: Sequence[Workload],
        repetitions: int,
        *,
        check: bool,
    ) -> dict[str, float] | None:
        """Milliseconds by workload; None for settings that fail or compute wrong results."""
        try:
            if check and not (error := bench.error(config)) < MAX_ERROR:
                self.progress.say(f"{label}: left out, its relative error is {error}")
                return None
            return {each.name: bench.time(config, each, repetitions) for each in workloads}
        except TritonError as error:
            self.progress.say(f"{label}: left out, {type(error).__name__}: {error}")
            return None


def gate_workloads() -> list[Workload]:
    """All workloads of `Tuner.tune_gate`."""
    return [gate_workload(degree, tokens) for degree in GATE_DEGREES for tokens in GATE_PREFIXES]


def _split_label(rule: SplitRule) -> str:
    return f"min_tokens={rule.min_tokens} pieces_per_program={rule.pieces_per_program}"
