"""Fields in an order by row: in prompts, in plans, and in what is said of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, build_tokenizer
from support.fake_job import DS, fake_spec, finish, planned, write_table

from batchllm_operator.errors import SpecError
from batchllm_operator.plan.advise import advise, format_advice
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.plan.rows.ordering import choose_orders, with_orders
from batchllm_operator.plan.rows.prompting import Prompter
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.report.summary import format_plan, format_summary
from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

COLUMNS = ["title", "review", "stars"]
FIELDS = {"order": "by_row", "columns": COLUMNS}
PROMPT = {"system": "", "template": "Rate it.\n{fields}Answer:", "fields": FIELDS}
PLAIN = "Rate it.\ntitle: {title}\nreview: {review}\nstars: {stars}\nAnswer:"


def reviews(num: int = 10) -> list[dict[str, Any]]:
    """Some rows share a title, the others a review."""
    titles = [f"The title of book {idx}" for idx in range(num)]
    texts = [f"What I have to say about it is {idx}" for idx in range(num)]
    rows = [{"title": titles[0], "review": text} for text in texts]
    rows += [{"title": title, "review": texts[0]} for title in titles[1:]]
    return [
        {"row_key": f"{idx}", "query": "", "stars": idx % 3, **row} for idx, row in enumerate(rows)
    ]


def job(lake: Path, **changes: Any) -> JobSpec:
    return fake_spec(lake, **{"prompt": PROMPT, **changes})


def texts(spec: JobSpec, rows: list[dict[str, Any]]) -> list[str]:
    """Prompts of rows in their orders; "" where there is an error."""
    batch, tokenizer = pa.RecordBatch.from_pylist(rows), load_tokenizer(spec, DS)
    [ordered] = with_orders([batch], choose_orders(spec, [batch]))
    made = Prompter(spec, tokenizer, None).prompts(ordered)
    found = [""] * len(rows)
    for idx, row in enumerate(made.rendered.idxs.tolist()):
        found[row] = tokenizer.decode(made.tokens.prompt(idx).tolist())
    return found


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_each_prompt_has_all_fields_and_begins_with_what_it_shares(tmp_path: Path) -> None:
    rows = reviews()
    made = texts(job(tmp_path), rows)
    for text, row in zip(made, rows, strict=True):
        assert lines(text) == lines(PLAIN.format(**row))
        assert text.startswith("Rate it.\n") and text.endswith("\nAnswer:")
    assert all(text.startswith("Rate it.\ntitle: The title of book 0\n") for text in made[1:10])
    assert all(text.startswith("Rate it.\nreview: What") for text in made[10:])


def test_a_plan_saves_what_it_says_and_more_than_any_single_order(tmp_path: Path) -> None:
    rows = reviews()
    plan = planned(tmp_path, rows, prompt=PROMPT)
    counts = plan.manifest.counts
    assert plan_job(plan.manifest.spec, DS).manifest.to_bytes() == plan.manifest.to_bytes()
    assert counts.num_field_orders > 1
    assert counts.num_field_bytes == sum(
        len(f"{name}: {row[name]}\n") for row in rows for name in COLUMNS
    )
    assert counts.num_shared_field_bytes > counts.num_single_order_bytes > 0
    advice = advise(job(tmp_path), DS)
    given, *singles = advice.alternatives
    assert given.is_given and given.fields is not None and len(singles) == 6
    assert given.saving_ratio == pytest.approx(counts.optimal_saving_ratio)
    assert given.saving_ratio > max(each.saving_ratio for each in singles)
    said = format_plan(plan.manifest, "URI")
    assert f"fields stand in {counts.num_field_orders} orders (prompt.fields)" in said
    report = finish(plan)
    assert report.num_rows_out == len(rows) and report.num_failed_rows == 0
    share = counts.num_shared_field_bytes / counts.num_field_bytes
    assert f"{counts.num_field_orders} orders, chosen by row: {share:.1%}" in format_summary(report)
    assert report.figures()["num_field_orders"] == counts.num_field_orders


def test_advice_names_fields_and_what_they_would_save(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", reviews())
    spec = job(tmp_path, prompt={"system": "", "template": PLAIN, "fields": None})
    advice = advise(spec, DS)
    best = advice.alternatives[0]
    assert (best.template, best.is_given) == (PROMPT["template"], False)
    assert best.fields == {**FIELDS, "render": "{name}: {value}\n"}
    changed = job(tmp_path, prompt={**PROMPT, "template": best.template, "fields": best.fields})
    assert advise(changed, DS).alternatives[0].saving_ratio == best.saving_ratio
    assert '"Rate it.\\n{fields}Answer:"  fields: {"order": "by_row"' in format_advice(advice)
    unlabelled = job(
        tmp_path, prompt={"template": "Is {title} good? It has {stars}.", "fields": None}
    )
    assert not any(each.fields for each in advise(unlabelled, DS).alternatives)


def test_a_row_without_a_value_fails_and_shares_nothing(tmp_path: Path) -> None:
    rows = reviews()
    whole = planned(tmp_path, rows, prompt=PROMPT).manifest.counts
    rows.insert(3, {**rows[3], "row_key": "null", "stars": None})
    plan = planned(tmp_path, rows, prompt=PROMPT, max_failed_fraction=0.5)
    counts = plan.manifest.counts
    assert counts.num_rejected_rows == 1
    assert counts.num_field_bytes == whole.num_field_bytes
    assert counts.num_shared_field_bytes == whole.num_shared_field_bytes
    report = finish(plan)
    assert report.errors_by_kind == {"null_value": 1}


def test_rows_of_several_files_and_batches_keep_their_orders(tmp_path: Path) -> None:
    rows = reviews(40)
    write_table(tmp_path / "documents", rows)
    folder = tmp_path / "documents" / f"ds={DS}"
    one = plan_job(job(tmp_path), DS).manifest
    table = pa.Table.from_pylist(rows)
    (folder / "a.parquet").unlink()
    pq.write_table(table.slice(0, 30), folder / "a.parquet", row_group_size=7)
    pq.write_table(table.slice(30), folder / "b.parquet")
    several = plan_job(job(tmp_path), DS).manifest
    assert several.files == one.files and several.counts == one.counts
    kept = {"input": {"filter": [{"column": "stars", "op": "<", "value": 2}]}}
    some = plan_job(job(tmp_path, **kept), DS).manifest.counts
    others = [row for row in rows if row["stars"] < 2]
    expected = planned(tmp_path / "others", others, prompt=PROMPT).manifest.counts
    assert some == expected


def test_lists_numbers_and_values_in_columns_are_fields(tmp_path: Path) -> None:
    fields = {"columns": ["tags", "doc.year", "n"], "render": "<{name}>{value}</{name}>"}
    prompt = {**PROMPT, "template": "{{fields}} {fields}.", "fields": {**FIELDS, **fields}}
    rows = [
        {"row_key": f"{idx}", "query": "", "tags": ["a", "b"], "doc": {"year": 1990}, "n": idx}
        for idx in range(4)
    ]
    plan = planned(tmp_path, rows, prompt=prompt)
    assert plan.manifest.counts.num_field_orders == 1
    for text in prompts_of(plan):
        assert text.startswith("{fields} ") and text.endswith("</n>.")
        assert '<tags>["a", "b"]</tags>' in text and "<doc.year>1990</doc.year>" in text


def prompts_of(plan: StoredPlan) -> list[str]:
    found = []
    for shard in plan.manifest.shards:
        with plan.folder.open_file(shard.file) as file:
            ids = pq.read_table(file).column("prompt_token_ids").to_pylist()
        found += [bytes(each).decode() for each in ids]
    return found


def test_long_values_are_cut_in_any_place(tmp_path: Path) -> None:
    spec = job(
        tmp_path,
        prompt={**PROMPT, "truncate": {"review": "end"}},
        engine={"max_model_len": 120},
        sampling={"max_tokens": 8},
    )
    rows = [{**row, "review": row["review"] * 9} for row in reviews(4)]
    made = texts(spec, rows)
    assert {text.index("review:") for text in made} != {len("Rate it.\n")}
    for text, row in zip(made, rows, strict=True):
        assert len(text) <= 112 and f"title: {row['title']}\n" in text
        assert f"stars: {row['stars']}\n" in text and text.endswith("Answer:")


def test_chats_have_their_fields_in_order(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "template": "Rate."},
        {"role": "user", "template": "Book:\n{fields}"},
    ]
    rows = reviews()
    prompt = {"system": None, "template": None, "turns": turns, "fields": FIELDS}
    as_turns = texts(job(tmp_path, prompt=prompt), rows)
    assert all('"content": "Book:\\ntitle: The title of book 0' in text for text in as_turns[1:10])
    assert all('"content": "Book:\\nreview: ' in text for text in as_turns[10:])
    build_tokenizer(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    fields = {
        "prompt": {**PROMPT, "chat_template": True},
        "model": {"path": str(tmp_path / "model")},
        "engine": {"backend": "fake", "extra_args": {"byte_tokens": False}},
    }
    tokenizer = load_tokenizer(spec := job(tmp_path, **fields), DS)
    batch = pa.RecordBatch.from_pylist(rows)
    [ordered] = with_orders([batch], choose_orders(spec, [batch]))
    rendered = tokenizer.renderer(spec.prompt).render(ordered).texts.to_pylist()
    assert all("title: The title of book 0\n" in text for text in rendered[1:10])
    assert rendered[1].index("title:") < rendered[1].index("review:")
    assert rendered[-1].index("review:") < rendered[-1].index("title:")


def test_rows_of_different_adapters_share_no_order(tmp_path: Path) -> None:
    rows = [
        {"a": "same", "b": f"{idx}", "domain": "legal" if idx % 2 else None} for idx in range(4)
    ]
    fields = {"order": "by_row", "columns": ["a", "b"], "render": "{name}{value}"}
    adapters = {"path": "x", "adapters": {"legal": "./legal"}, "adapter_column": "domain"}
    prompt = {"template": "{fields}", "fields": fields}
    batches = [pa.RecordBatch.from_pylist(rows)]
    apart = choose_orders(job(tmp_path, prompt=prompt, model=adapters), batches)
    together = choose_orders(job(tmp_path, prompt=prompt), batches)
    assert apart.num_shared_bytes == 2 * len("asame")
    assert together.num_shared_bytes == 3 * len("asame")


def test_reused_outputs_and_empty_partitions(tmp_path: Path) -> None:
    plan = planned(tmp_path, reviews(), prompt=PROMPT, reuse_outputs=True)
    finish(plan)
    again = plan_job(plan.manifest.spec, DS).manifest.counts
    assert again.num_reused_rows == again.num_rows == 19
    empty = plan_job(job(tmp_path, on_empty="commit"), "2000-01-01").manifest.counts
    assert (empty.num_rows, empty.num_field_orders) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ({"fields": {**FIELDS, "columns": []}}, "columns"),
        ({"fields": {**FIELDS, "columns": [f"c{idx}" for idx in range(17)]}}, "columns"),
        ({"fields": {**FIELDS, "columns": ["a", "a"]}}, "names a column twice"),
        ({"fields": {**FIELDS, "columns": ["a", "fields"]}}, "rename the column 'fields'"),
        ({"fields": {**FIELDS, "columns": ["a:b"]}}, "can't place 'a:b'"),
        ({"fields": {**FIELDS, "render": "{value}\n"}}, "must have the places"),
        ({"fields": {**FIELDS, "render": "{name}{value}{x}"}}, "must have the places"),
        ({"fields": {**FIELDS, "order": "as_given"}}, "order"),
        ({"template": "{title}"}, "template must have one place {fields}"),
        ({"template": "{fields}{fields}"}, "template must have one place {fields}"),
        ({"template": "{{fields}}{title}"}, "template must have one place {fields}"),
        ({"template": None, "messages": "chat"}, "messages must have one place"),
        ({"truncate": {"query": "end"}}, "places no column 'query'"),
    ],
)
def test_faults_of_fields(tmp_path: Path, prompt: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(tmp_path, prompt={**PROMPT, **prompt})
    assert fault in str(caught.value)


def test_a_column_called_fields_is_one_without_fields(tmp_path: Path) -> None:
    rows = [{"row_key": "a", "query": "", "fields": "wheat"}]
    plan = planned(tmp_path, rows, prompt={"system": None, "template": "{fields}!"})
    assert prompts_of(plan) == ["wheat!"]


def test_a_missing_column_and_a_small_budget_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", reviews())
    with pytest.raises(SpecError, match=r"prompt\.template: .* no column 'brand'"):
        plan_job(job(tmp_path, prompt={**PROMPT, "fields": {**FIELDS, "columns": ["brand"]}}), DS)
    tight = job(tmp_path, planner={"memory_budget_bytes": "1MB"})
    with pytest.raises(SpecError, match="memory_budget_bytes"):
        plan_job(tight, DS)


def test_spark_refuses_fields_at_once(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from batchllm_operator.spark.plan_job import plan_on_spark

    with pytest.raises(SpecError, match=r"prompt\.fields: isn't for planner\.engine: spark"):
        plan_on_spark(parse_spec(job(tmp_path).model_dump(mode="json"), source="test"), DS)
