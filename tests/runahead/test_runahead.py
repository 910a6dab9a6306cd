"""The chain's model against the paper's figures, and what the command prints of it."""

from __future__ import annotations

import math

import pytest

from batchllm_operator.cost import model_shape
from batchllm_operator.simulate.runahead import (
    Calibration,
    Paper,
    PaperMachine,
    PredictedRow,
    log_errors,
    predict_rows,
    read_paper,
    root_mean_square,
)
from batchllm_operator.simulate.runahead_summary import format_rows, result, speedup_errors


@pytest.fixture(scope="module")
def rows() -> list[PredictedRow]:
    return predict_rows()


def of(
    rows: list[PredictedRow], model: str, num_gpus: int, gbytes_per_s: float | None
) -> dict[int, PredictedRow]:
    network = None if gbytes_per_s is None else gbytes_per_s * 1e9
    return {
        row.context: row
        for row in rows
        if (row.model, row.num_gpus, row.network_bytes_per_s) == (model, num_gpus, network)
    }


def test_speedups_over_tsp_are_within_15_percent_of_the_papers(rows: list[PredictedRow]) -> None:
    four, eight = of(rows, "Llama 7B", 4, 300), of(rows, "Llama 7B", 8, 300)
    printed = {2048: 1.11, 4096: 1.17, 8192: 1.30, 12288: 1.39, 16384: 1.42}  # Table 1
    for context, speedup in printed.items():
        assert four[context].speedup == pytest.approx(speedup, rel=0.15)
        assert four[context].paper_speedup == pytest.approx(speedup, rel=0.02)
    assert eight[16384].speedup == pytest.approx(1.41, rel=0.15)  # App. A
    assert of(rows, "Llama 7B MQA", 8, 300)[16384].speedup == pytest.approx(1.48, rel=0.15)
    assert of(rows, "Llama 7B GQA8", 8, 300)[16384].speedup == pytest.approx(1.46, rel=0.15)
    slow = of(rows, "Llama 7B", 4, 10)  # Fig. 8 (e, f)
    assert slow[8192].even_speedup == pytest.approx(1.55, rel=0.15)
    assert slow[12288].speedup == pytest.approx(1.79, rel=0.15)
    errors = speedup_errors(rows)
    assert len(errors) == 6
    assert max(map(abs, errors)) < 0.15


def test_times_are_near_the_papers_with_one_set_of_constants(rows: list[PredictedRow]) -> None:
    fitted = [row for row in rows if row.fitted]
    assert {row.model for row in fitted} == {"Llama 7B", "Llama 7B MQA", "Llama 7B GQA8"}
    errors = log_errors(fitted)
    assert len(errors) == 53
    assert root_mean_square(errors) < 0.06
    assert max(map(abs, errors)) < math.log(1.2)
    models = ("Llama 13B", "Llama 30B", "Falcon 7B")
    for unseen in (
        [row for row in rows if row.model in models],
        [row for row in rows if row.num_gpus == 8 and row.model not in models],
    ):
        assert not any(row.fitted for row in unseen)
        assert 0 < root_mean_square(log_errors(unseen)) < 0.1


def test_the_papers_observations_hold(rows: list[PredictedRow]) -> None:
    """Sec. 5 and App. B."""
    for network, p in ((300, 4), (300, 8), (10, 4)):
        found = of(rows, "Llama 7B", p, network)
        for row in found.values():
            assert row.kvr_s_s <= row.kvr_e_s, "searched chunks are no slower than even ones"
        assert found[12288].kvr_e_s < found[12288].tsp_s, "even those are faster than TSP"
        assert found[12288].speedup > found[2048].speedup, "more so with longer contexts"
    alone, two = of(rows, "Llama 7B", 1, None), of(rows, "Llama 7B", 2, 10)
    assert two[12288].kvr_s_s < 0.55 * alone[12288].kvr_s_s
    four = of(rows, "Llama 7B", 4, 10)
    assert four[2048].kvr_s_s > 0.95 * two[2048].kvr_s_s, "short: more GPUs on a slow network"
    bound = alone[16384 - 4096].kvr_s_s / 2 * (1 / 4 + 1 / 16)  # Eq. 2
    assert of(rows, "Llama 7B", 4, 300)[12288].kvr_s_s > bound


def test_chunks_are_those_that_the_paper_found() -> None:
    """Fig. 6 (a): 9,728 of 16,384 tokens; Sec. 5: 10k between 8k and 12k."""
    paper = read_paper()
    machine = PaperMachine(paper)
    for given in paper.splits:
        found = machine.predict_split(given)
        assert sum(found.shares) == pytest.approx(1, abs=0.002)
        assert found.shares == pytest.approx(given.shares, abs=0.03)
        assert 1 <= found.ttft_over_searched < 1.05


def test_a_table_predicts_as_well_as_the_paper_says() -> None:
    """Fig. 10: interpolated between entries 4k apart, within 1.3 % of searched ones."""
    machine = PaperMachine(read_paper())
    chain = machine.chain("Llama 7B", 300e9)
    from batchllm_operator.runahead.planning import SplitTable, search_split

    table = SplitTable.search(chain, [8192, 12288, 16384], 4)
    for context in (10_240, 14_336):
        searched = chain.times(search_split(chain, context, 4)).ttft_s
        assert chain.times(table.split(context)).ttft_s <= 1.02 * searched


def test_the_constants_are_those_of_the_best_fit() -> None:
    """No constant, changed by a tenth, leaves smaller errors."""
    best = root_mean_square(log_errors(predict_rows(only_fitted=True)))
    stored = read_paper().calibration
    for name, value in stored.model_dump().items():
        for factor in (0.9, 1.1):
            changed = Calibration(**stored.model_dump() | {name: value * factor})
            errors = log_errors(predict_rows(changed, only_fitted=True))
            assert root_mean_square(errors) > best, (name, factor)


def test_the_papers_models_have_the_shapes_of_their_configs() -> None:
    """LLaMA's published config, by the reader of such files."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    for name, kv_heads in (("Llama 7B", 32), ("Llama 7B MQA", 1), ("Llama 7B GQA8", 8)):
        shape = model_shape({**config, "num_key_value_heads": kv_heads}, name)
        given = read_paper().models[name]
        for field, value in given.items():
            assert getattr(shape, field) == value, (name, field)
    larger = {
        "Llama 13B": (40, 5120, 40, 13824),
        "Llama 30B": (60, 6656, 52, 17920),
    }
    for name, (layers, hidden, heads, intermediate) in larger.items():
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": intermediate,
        }
        shape = model_shape({**config, **sizes}, name)
        assert shape.num_parameters == read_paper().models[name]["num_parameters"]


def test_falcons_matrices_have_as_many_weights_as_its_own() -> None:
    for name, hidden in (("Falcon 1B", 2048), ("Falcon 7B", 4544)):
        shape = read_paper().models[name]
        own = 2 * hidden * 4 * hidden
        assert 3 * hidden * shape["intermediate_size"] == pytest.approx(own, rel=1e-4)


def test_a_file_that_contradicts_itself_is_refused() -> None:
    body = read_paper().model_dump()
    Paper.model_validate(body)
    for change, said in (
        ({"model": "Llama 8B"}, "no models Llama 8B"),
        ({"num_gpus": 1}, "a network is for several GPUs"),
        ({"network_bytes_per_s": None}, "a network is for several GPUs"),
    ):
        settings = [dict(body["settings"][1]) | change, *body["settings"][2:]]
        with pytest.raises(ValueError, match=said):
            Paper.model_validate(body | {"settings": settings})


def test_the_summary_is_of_all_rows(rows: list[PredictedRow]) -> None:
    paper = read_paper()
    splits = [PaperMachine(paper).predict_split(each) for each in paper.splits]
    printed = format_rows(paper, rows, splits).splitlines()
    body = result(paper, rows, splits)
    assert printed[2].split()[:5] == ["source", "model", "GPUs", "GB/s", "context"]
    table = printed[3 : 3 + len(rows)]
    assert len({len(line) for line in printed[2 : 3 + len(rows)]}) == 1, "columns are aligned"
    for row, line in zip(rows, table, strict=True):
        assert line.startswith(row.source)
        assert ("*" in line) is not row.fitted
        assert f" {row.context:,} " in line
        assert f"{row.kvr_s_s:.3f}" in line
    for label in ("8 GPUs", "1 GB/s", "other models"):
        assert body["rms_log_error_unseen"][label] > 0
        assert f"  not fitted, {label}: " in "\n".join(printed)
    assert "6 constants fitted to 53 figures" in "\n".join(printed)
    assert len(body["rows"]) == len(rows)
    assert body["num_fitted_parameters"] == 6
    assert body["worst_llama_7b_speedup_error"] < 0.15
    sixteen = [row for row in body["rows"] if (row["context"], row["num_gpus"]) == (16384, 8)]
    assert sixteen[0]["speedup"] == pytest.approx(
        sixteen[0]["tsp_s"] / sixteen[0]["kvr_s_s"], rel=1e-3
    )
