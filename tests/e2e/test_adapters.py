"""Rows with LoRA adapters get what stock vLLM's `LLM.generate` gives with them."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.adapters import write_adapter
from support.demo_job import DS, Demo, snippet_prompt

from batchllm_operator.model.weights import weight_shapes

NAMES = ("formal", "terse")
TABLE = "documents-by-style"


@pytest.fixture(scope="module")
def modules(demo: Demo) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the model's matrices by the module's name."""
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in weight_shapes(demo.model / "model.safetensors").items()
        if "_proj.weight" in name
    }


@pytest.fixture(scope="module")
def adapters(demo: Demo, modules: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Paths of two adapters by name, relative to the specs."""
    for seed, name in enumerate(NAMES):
        write_adapter(demo.folder / name, modules, seed=seed, rank=4 * (1 + seed))
    return {name: f"./{name}" for name in NAMES}


@pytest.fixture(scope="module")
def rows(demo: Demo) -> list[dict[str, Any]]:
    """Rows of the demo table by turns without an adapter and with each."""
    found = pq.read_table(demo.folder / "documents").drop_columns("ds").to_pylist()
    found = [row for row in found if row["package"] < "h"]
    for number, row in enumerate(found):
        row["style"] = (None, *NAMES)[number % 3]
    partition = demo.folder / TABLE / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(found), partition / "rows.parquet")
    return found


@pytest.fixture(scope="module")
def stock(demo: Demo, rows: list[dict[str, Any]], adapters: dict[str, str]) -> list[str]:
    """The text of each row."""
    job = {
        "prompts": [*map(snippet_prompt, rows)],
        "adapters": [row["style"] and str(demo.folder / row["style"]) for row in rows],
        "sampling": {"max_tokens": 12, "temperature": 0.0},
    }
    [found] = demo.stock("answers", [job])
    return [text for [(text, _)] in found]


def test_texts_equal_those_of_stock_vllm(
    demo: Demo, rows: list[dict[str, Any]], adapters: dict[str, str], stock: list[str]
) -> None:
    job = demo.run_job(
        "adapters",
        input={"uri": TABLE},
        model={"adapters": adapters, "adapter_column": "style"},
        sampling={"max_tokens": 12},
        engine={"attention": "batchllm"},
    )
    table = job.table.to_pylist()
    assert [row["snippet_id"] for row in table] == [row["snippet_id"] for row in rows]
    assert [row["generated_text"] for row in table] == stock
    assert len(set(stock)) > 40
    assert job.report["achieved_saving_ratio"] > job.report["planned_saving_ratio"] - 0.01
