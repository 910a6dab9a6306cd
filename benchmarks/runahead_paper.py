"""Compares a model of the KV-Runahead paper's machine with its figures (`runahead_paper.toml`).

    python -m benchmarks.runahead_paper

For each setting of the paper's Tables 1 to 3 it predicts TTFT of tensor and sequence parallelism
with an all-gather (TSP), of the chain with equal chunks (KVR-E) and with searched ones (KVR-S), and
for two lengths that of chunks from a look-up table (KVR-P), with one set of constants. In the
paper, each replica relays the KV of all tokens before to the next, and attention also computes
masked pairs. The last line is a JSON object.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.amounts import text_table
from batchllm_operator.cost import ModelShape, find_gpu
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.runahead.prediction import Chain, ReplicaCost, Split
from benchmarks.runahead_rules import even_split

BLOCK_SIZE: Final = 128
"""Chunks are multiples of this. The paper doesn't give its least stride; the searched chunk in
its Fig. 6 (a) is a multiple of 512."""
_FIGURES: Final = {
    "tsp": "TTFT of TSP",
    "kvr_s": "TTFT of KVR-S, or of one GPU",
    "speedup": "speed-ups of KVR-S that are given alone",
    "even_speedup": "speed-ups of KVR-E",
}
_HEADINGS: Final = (
    *("source", "model", "GPUs", "GB/s", "context", "TSP", "paper", "KVR-E", "KVR-S", "paper"),
    *("speed-up", "paper"),
)


@cache
def paper() -> dict[str, Any]:
    """The paper's figures and our constants."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class PaperChain(Chain):
    """The paper's GPUs in a row; a layer's QKV projections hide its receive (Sec. 4.3)."""

    layer_overhead_s: float = 0.0
    """The least time of a layer: the host launches its kernels."""

    def seconds(self, splits: NDArray[np.int64]) -> NDArray[np.float64]:
        """TTFT of each split: [num_splits, p] -> [num_splits]."""
        cost, chunks = self.cost, splits.astype(np.float64)
        before = np.cumsum(chunks, axis=1) - chunks
        passed_on = before + chunks
        passed_on[:, -1] = 0
        matrices_s = np.maximum(chunks * cost.s_per_token, 1e-30)
        slower = np.maximum(1.0, cost.weights_s / matrices_s)
        first_s = chunks * cost.qkv_s_per_token * slower
        copies_s = (before + passed_on) * cost.kv_copy_s_per_token
        rest_s = chunks * cost.other_s_per_token * slower
        rest_s += chunks * (before + chunks) * cost.s_per_pair
        rest_s = np.maximum(rest_s, self.layer_overhead_s - first_s - copies_s)
        hop_s = before * cost.kv_bytes_per_token / self.link_bytes_per_s
        seconds = _relay(first_s, copies_s, rest_s, hop_s, cost.num_layers)
        return np.where(splits.min(axis=1) < 1, np.inf, seconds + cost.sampled_token_s)

    def ttft_s(self, split: Sequence[int]) -> float:
        """TTFT of one split."""
        return float(self.seconds(np.array([split]))[0])

    def all_gather_s(self, num_tokens: int, bytes_per_s: float, overhead_s: float) -> float:
        """TTFT of TSP: all have an equal chunk, and in each layer all exchange their KV (Fig. 4).

        Args:
            num_tokens: tokens of the prefix.
            bytes_per_s: rate at which each process receives.
            overhead_s: of each all-gather on the host, in addition to launching the layer.
        """
        cost, chunk = self.cost, -(-num_tokens // self.num_replicas)
        layer_s = (
            max(chunk * cost.s_per_token, cost.weights_s)
            + (num_tokens - chunk) * cost.kv_bytes_per_token / bytes_per_s
            + num_tokens * cost.kv_copy_s_per_token
            + chunk * num_tokens * cost.s_per_pair
        )
        layer_s = max(layer_s, self.layer_overhead_s + overhead_s)
        return cost.num_layers * layer_s + cost.sampled_token_s


@compiled
def _relay(
    first_s: NDArray[np.float64],
    copies_s: NDArray[np.float64],
    rest_s: NDArray[np.float64],
    hop_s: NDArray[np.float64],
    num_layers: int,
) -> NDArray[np.float64]:
    """When the last replica is done, for each row of [num_splits, p] seconds of a layer."""
    num, p = first_s.shape
    seconds = np.empty(num)
    for row in range(num):
        done, arrived = np.zeros(p), np.zeros(p)
        for _ in range(num_layers):
            ready = 0.0
            for i in range(p):
                at = done[i] + first_s[row, i]
                if i > 0:
                    arrived[i] = max(ready, arrived[i], done[i]) + hop_s[row, i]
                    at = max(at, arrived[i])
                ready = at + copies_s[row, i]
                done[i] = ready + rest_s[row, i]
        seconds[row] = done[p - 1]
    return seconds


def paper_chain(setting: Mapping[str, Any], constants: Mapping[str, float]) -> PaperChain:
    """The machine of a setting, with these constants."""
    gpu = replace(
        find_gpu(paper()["gpu"]),
        achievable_compute=constants["achievable_compute"],
        step_overhead_s=0.0,  # included in the layers'
    )
    shape = ModelShape(setting["model"], **paper()["models"][setting["model"]])
    cost = ReplicaCost.of(shape, gpu)
    scores_s = shape.num_heads * constants["score_bytes"] / gpu.bytes_per_s
    return PaperChain(
        replace(cost, s_per_pair=cost.s_per_pair + scores_s),
        setting["num_gpus"],
        setting.get("network_bytes_per_s", 1e15) * constants["link_share"],
        block_size=BLOCK_SIZE,
        layer_overhead_s=constants["layer_overhead_s"],
    )


def search_split(chain: Chain, num_tokens: int) -> Split:
    """A split that no move of blocks improves, by a pattern search from our split on (KVR-S).

    A chunk grows by what another loses, or all others, or shrinks so. Strides halve down to one
    block.
    """
    p, one = chain.num_replicas, np.eye(chain.num_replicas, dtype=np.int64)
    moves = [one[grows] - one[shrinks] for grows, shrinks in permutations(range(p), 2)]
    moves += [sign * (p * chunk - 1) for chunk in one for sign in (1, -1)]
    best = np.array(chain.split(num_tokens))
    stride = 1 << max(num_tokens // chain.block_size // 4, 1).bit_length() - 1
    while stride:
        near = best + np.array([0 * one[0], *moves]) * (stride * chain.block_size)
        at = int(np.argmin(chain.seconds(near)))
        best, stride = near[at], stride if at else stride // 2
    return tuple(best.tolist())


def split_by_shares(chain: Chain, num_tokens: int, ends: Sequence[float]) -> Split:
    """Whole blocks nearest to these shares of the prefix, where chunks but the last end."""
    return chain.split_at(lambda _, left: num_tokens * ends[-left + 1], num_tokens)


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
    figures: Mapping[str, float]
    """What the paper prints, by name; `speedup` also where it follows from both times."""

    def errors(self) -> dict[str, float]:
        """Logarithms of predicted over printed values, of all that the paper prints."""
        predicted = {
            "tsp": self.tsp_s,
            "kvr_s": self.kvr_s_s,
            "speedup": self.tsp_s / self.kvr_s_s,
            "even_speedup": self.tsp_s / self.kvr_e_s,
        }
        names = set(self.figures) - ({"speedup"} if "tsp" in self.figures else set())
        return {name: math.log(predicted[name] / self.figures[name]) for name in names}


def predict_rows(
    constants: Mapping[str, float] | None = None, *, only_fitted: bool = False
) -> Iterator[PredictedRow]:
    """All rows of the paper's settings, or only figures that the constants were fitted to."""
    constants = constants or paper()["calibration"]
    for setting in paper()["settings"]:
        chain, network = paper_chain(setting, constants), setting.get("network_bytes_per_s")
        for row in setting["rows"]:
            figures = dict(row)
            context = figures.pop("context")
            if only_fitted and not (setting["fitted"] and figures):
                continue
            if "tsp" in figures and "kvr_s" in figures:
                figures["speedup"] = figures["tsp"] / figures["kvr_s"]
            split = search_split(chain, context)
            tsp_s = chain.ttft_s(split)
            if network is not None:
                rate = network * constants["gather_share"]
                tsp_s = chain.all_gather_s(context, rate, constants["gather_overhead_s"])
            yield PredictedRow(
                setting["source"],
                setting["model"],
                setting["num_gpus"],
                network,
                setting["fitted"],
                context,
                tsp_s,
                chain.ttft_s(even_split(chain, context)),
                chain.ttft_s(split),
                split,
                figures,
            )


def predict_splits() -> Iterator[dict[str, Any]]:
    """The splits that the paper gives, beside ours: searched, or interpolated as there."""
    for given in paper()["splits"]:
        chain, context = paper_chain(given, paper()["calibration"]), given["context"]
        best = split = search_split(chain, context)
        if "between" in given:  # a look-up table's lengths (KVR-P)
            table = [np.cumsum(search_split(chain, num)) / num for num in given["between"]]
            columns = np.array(table)[:, :-1].T
            ends = [float(np.interp(context, given["between"], column)) for column in columns]
            split = split_by_shares(chain, context, ends)
        theirs = split_by_shares(chain, context, np.cumsum(given["shares"])[:-1].tolist())
        rate = given["network_bytes_per_s"] * paper()["calibration"]["gather_share"]
        tsp_s = chain.all_gather_s(context, rate, paper()["calibration"]["gather_overhead_s"])
        yield {
            "source": given["source"],
            "num_gpus": given["num_gpus"],
            "context": context,
            "shares": [round(chunk / context, 3) for chunk in split],
            "paper_shares": given["shares"],
            "speedup": round(tsp_s / chain.ttft_s(split), 3),
            "paper_chunks_over_searched": chain.ttft_s(theirs) / chain.ttft_s(best),
        }


def root_mean_square(rows: Sequence[PredictedRow], figure: str | None = None) -> float:
    """Root mean square of the errors of some rows, of all figures or of one."""
    errors = [
        error for row in rows for name, error in row.errors().items() if figure in (None, name)
    ]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def unseen(rows: Sequence[PredictedRow]) -> dict[str, list[PredictedRow]]:
    """Rows outside of the fit, by their difference from the fitted ones."""
    fitted = [row for row in rows if row.fitted]
    models, num_gpus = {row.model for row in fitted}, {row.num_gpus for row in fitted}
    by_label: dict[str, list[PredictedRow]] = {}
    for row in rows:
        if not row.fitted and row.figures:
            label = f"{(row.network_bytes_per_s or 0) / 1e9:g} GB/s"
            if row.model not in models:
                label = "other models"
            elif row.num_gpus not in num_gpus:
                label = f"{row.num_gpus} GPUs"
            by_label.setdefault(label, []).append(row)
    return by_label


def _cells(row: PredictedRow) -> tuple[str, ...]:
    is_alone, printed = row.network_bytes_per_s is None, row.figures.get
    return (
        row.source + ("" if row.fitted else " *"),
        row.model,
        str(row.num_gpus),
        "" if row.network_bytes_per_s is None else f"{row.network_bytes_per_s / 1e9:g}",
        f"{row.context:,}",
        "" if is_alone else f"{row.tsp_s:.3f}",
        str(printed("tsp", "")),
        "" if is_alone else f"{row.kvr_e_s:.3f}",
        f"{row.kvr_s_s:.3f}",
        str(printed("kvr_s", "")),
        "" if is_alone else f"{row.tsp_s / row.kvr_s_s:.2f}",
        f"{printed('speedup'):.2f}" if "speedup" in row.figures else "",
    )


def main() -> None:
    """Print the table, the errors, and all of it as JSON."""
    rows, splits = list(predict_rows()), list(predict_splits())
    fitted = [row for row in rows if row.fitted]
    print("TTFT in seconds; rows with * took no part in the fit", end="\n\n")
    print(*text_table([_HEADINGS, *map(_cells, rows)], left=(0, 1)), "", sep="\n")
    errors = {label: root_mean_square(fitted, name) for name, label in _FIGURES.items()}
    errors |= {
        f"not fitted, {label}": root_mean_square(some) for label, some in unseen(rows).items()
    }
    for label, error in errors.items():
        print(f"off by {error:.1%} (root mean square): {label}")
    report = {
        "benchmark": "runahead_paper",
        "rms_error_fitted": root_mean_square(fitted),
        "rms_errors": errors,
        "constants": paper()["calibration"],
        "rows": [asdict(row) for row in rows],
        "splits": splits,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
