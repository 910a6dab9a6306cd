"""Compares the chain's model with the KV-Runahead paper's figures (`runahead_paper.toml`).

For each setting of the paper's Tables 1 to 3, it predicts TTFT of tensor and sequence parallelism
with an all-gather (TSP), of the chain with equal chunks (KVR-E) and with searched ones (KVR-S), all
with one set of constants.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from batchllm_operator.cost import ModelShape, find_gpu
from batchllm_operator.runahead.planning import (
    AllGather,
    Chain,
    Link,
    ReplicaCost,
    SplitTable,
    all_gather_ttft,
    even_split,
    search_split,
)

BLOCK_SIZE: Final = 128
"""Chunks are multiples of this. The paper doesn't give its least stride; the searched chunk in
its Fig. 6 (a) is a multiple of 512."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
Quantity = Literal["tsp", "kvr_s", "speedup", "even_speedup"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Calibration(_Frozen):
    """Constants of the paper's machine; see the comments in `runahead_paper.toml`."""

    achievable_compute: Annotated[float, Field(gt=0, le=1)]
    score_bytes: _Positive
    layer_overhead_s: _Positive
    gather_overhead_s: _Positive
    link_share: Annotated[float, Field(gt=0, le=1)]
    gather_share: Annotated[float, Field(gt=0, le=1)]


class PaperRow(_Frozen):
    """The paper's figures for a context length, if any."""

    context: _Count
    tsp: _Positive | None = None
    """TTFT, in seconds."""
    kvr_s: _Positive | None = None
    """TTFT with searched chunks; with one GPU, without a chain."""
    speedup: _Positive | None = None
    """TTFT of TSP over that of KVR-S, if the paper's text gives it instead of both times."""
    even_speedup: _Positive | None = None
    """TTFT of TSP over that of KVR-E."""

    @property
    def has_figures(self) -> bool:
        """Whether the paper has any figure."""
        return any((self.tsp, self.kvr_s, self.speedup, self.even_speedup))


class PaperSetting(_Frozen):
    """A model on some GPUs."""

    source: str
    model: str
    num_gpus: _Count
    network_bytes_per_s: _Positive | None = None
    fitted: bool
    """Whether the calibration was fitted to these rows."""
    rows: tuple[PaperRow, ...]


class PaperSplit(_Frozen):
    """A split that the paper gives."""

    source: str
    model: str
    num_gpus: _Count
    network_bytes_per_s: _Positive
    context: _Count
    between: tuple[_Count, ...] = ()
    """Lengths between which the paper interpolates; empty if it has searched this one."""
    shares: tuple[_Positive, ...]


class Paper(_Frozen):
    """The file `runahead_paper.toml`."""

    gpu: str
    calibration: Calibration
    models: dict[str, dict[str, _Count]]
    """Fields of `ModelShape`."""
    settings: tuple[PaperSetting, ...]
    splits: tuple[PaperSplit, ...]

    @model_validator(mode="after")
    def _check(self) -> Paper:
        named = {each.model for each in self.settings} | {each.model for each in self.splits}
        if unknown := sorted(named - self.models.keys()):
            raise ValueError(f"there are no models {', '.join(unknown)}")
        for setting in self.settings:
            if (setting.network_bytes_per_s is None) != (setting.num_gpus == 1):
                raise ValueError(f"{setting.source}: a network is for several GPUs")
        return self


@cache
def read_paper() -> Paper:
    """The paper's figures and our constants."""
    text = (files("batchllm_operator.simulate") / "runahead_paper.toml").read_text("utf-8")
    return Paper.model_validate(tomllib.loads(text))


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A context length in one of the paper's settings; times are TTFT in seconds."""

    source: str
    model: str
    num_gpus: int
    network_bytes_per_s: float | None
    fitted: bool
    context: int
    tsp_s: float
    """With one GPU this and the next two are without a chain."""
    kvr_e_s: float
    kvr_s_s: float
    split: tuple[int, ...]
    """Tokens of each searched chunk."""
    paper_tsp_s: float | None
    paper_kvr_s_s: float | None
    paper_speedup: float | None
    """Of KVR-S over TSP, from the two times if the paper has both."""
    paper_even_speedup: float | None

    @property
    def speedup(self) -> float:
        """Of KVR-S over TSP."""
        return self.tsp_s / self.kvr_s_s

    @property
    def even_speedup(self) -> float:
        """Of KVR-E over TSP."""
        return self.tsp_s / self.kvr_e_s

    @property
    def speedup_error(self) -> float | None:
        """Relative error of the speed-up; None if the paper has none."""
        return self.speedup / self.paper_speedup - 1 if self.paper_speedup else None

    def log_errors(self) -> dict[Quantity, float]:
        """Logarithms of predicted over printed values, of all that the paper prints."""
        pairs: dict[Quantity, tuple[float, float | None]] = {
            "tsp": (self.tsp_s, self.paper_tsp_s),
            "kvr_s": (self.kvr_s_s, self.paper_kvr_s_s),
            "even_speedup": (self.even_speedup, self.paper_even_speedup),
        }
        if self.paper_tsp_s is None:  # else the speed-up follows from the times
            pairs["speedup"] = (self.speedup, self.paper_speedup)
        return {name: math.log(mine / its) for name, (mine, its) in pairs.items() if its}

    def figures(self) -> dict[str, Any]:
        """All fields as JSON, rounded."""
        found = asdict(self) | {"speedup": self.speedup, "speedup_error": self.speedup_error}
        return {
            name: round(value, 4) if isinstance(value, float) and value < 1e6 else value
            for name, value in found.items()
        }


@dataclass(frozen=True, slots=True)
class PredictedSplit:
    """Chunks of the paper and of our search, as shares of the context."""

    source: str
    num_gpus: int
    context: int
    shares: tuple[float, ...]
    paper_shares: tuple[float, ...]
    ttft_over_searched: float
    """Predicted TTFT of the paper's chunks over that of the searched ones."""


class PaperMachine:
    """The paper's GPUs and networks with our constants.

    Args:
        paper: figures and models.
        calibration: replaces the constants in the file.
    """

    def __init__(self, paper: Paper, calibration: Calibration | None = None) -> None:
        self._paper, self._constants = paper, calibration or paper.calibration
        self._gpu = replace(
            find_gpu(paper.gpu),
            achievable_compute=self._constants.achievable_compute,
            step_overhead_s=0.0,  # included in the layers'
        )

    def cost(self, model: str) -> ReplicaCost:
        """Cost of one GPU with one of the paper's models."""
        return ReplicaCost.of(
            ModelShape(model, **self._paper.models[model]),
            self._gpu,
            layer_overhead_s=self._constants.layer_overhead_s,
            computes_masked_pairs=True,
            score_bytes=self._constants.score_bytes,
        )

    def chain(self, model: str, network_bytes_per_s: float) -> Chain:
        """GPUs in a chain; a layer's QKV projections hide its receive (Sec. 4.3)."""
        link = Link(network_bytes_per_s * self._constants.link_share, prefetches=False)
        return Chain(self.cost(model), link, BLOCK_SIZE)

    def predict(self, setting: PaperSetting, rows: Sequence[PaperRow]) -> Iterator[PredictedRow]:
        """Predict some rows of a setting."""
        cost, network = self.cost(setting.model), setting.network_bytes_per_s
        for row in rows:
            split: tuple[int, ...] = (row.context,)
            tsp_s = even_s = searched_s = cost.chunk_seconds(row.context)
            if network is not None:
                chain, p = self.chain(setting.model, network), setting.num_gpus
                gather = AllGather(
                    network * self._constants.gather_share, self._constants.gather_overhead_s
                )
                tsp_s = all_gather_ttft(cost, gather, row.context, p)
                even_s = chain.times(even_split(row.context, p, BLOCK_SIZE)).ttft_s
                split = search_split(chain, row.context, p)
                searched_s = chain.times(split).ttft_s
            speedup = row.tsp / row.kvr_s if row.tsp and row.kvr_s else row.speedup
            yield PredictedRow(
                setting.source,
                setting.model,
                setting.num_gpus,
                network,
                setting.fitted,
                row.context,
                tsp_s,
                even_s,
                searched_s,
                split,
                row.tsp,
                row.kvr_s,
                speedup,
                row.even_speedup,
            )

    def predict_split(self, given: PaperSplit) -> PredictedSplit:
        """Predict a split of the paper: searched, or interpolated as there."""
        chain = self.chain(given.model, given.network_bytes_per_s)
        best = search_split(chain, given.context, given.num_gpus)
        split = best
        if given.between:
            table = SplitTable.search(chain, given.between, given.num_gpus)
            split = table.split(given.context)
        bounds = [0.0]
        for share in given.shares:
            bounds.append(bounds[-1] + share)
        ends = [round(each * given.context / BLOCK_SIZE) * BLOCK_SIZE for each in bounds[:-1]]
        theirs = [end - start for start, end in pairwise([*ends, given.context])]
        return PredictedSplit(
            given.source,
            given.num_gpus,
            given.context,
            tuple(round(chunk / given.context, 3) for chunk in split),
            given.shares,
            chain.times(theirs).ttft_s / chain.times(best).ttft_s,
        )


def predict_rows(
    calibration: Calibration | None = None, *, only_fitted: bool = False
) -> list[PredictedRow]:
    """All rows of the paper's settings, or only those that the calibration was fitted to."""
    paper = read_paper()
    machine = PaperMachine(paper, calibration)
    found: list[PredictedRow] = []
    for setting in paper.settings:
        if setting.fitted or not only_fitted:
            rows = [row for row in setting.rows if row.has_figures or not only_fitted]
            found += machine.predict(setting, rows)
    return found


def log_errors(rows: Sequence[PredictedRow]) -> list[float]:
    """The errors of all printed figures of some rows."""
    return [error for row in rows for error in row.log_errors().values()]


def root_mean_square(errors: Sequence[float]) -> float:
    """Root mean square; 0 of none."""
    return math.sqrt(sum(each**2 for each in errors) / len(errors)) if errors else 0.0
