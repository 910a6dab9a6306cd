"""Jobs of several prompts: one plan, one run and one commit give what a job for each would."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.answers_job import NEXT, SCHEMA, run_and_commit
from support.fake_job import DS, document_rows, finish, write_table
from support.prompts_job import OF_PLACE, PROMPTS, alone, asks_of, rows_by_key, several

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import FailedRow, find_failed_rows
from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.errors import FailedRowsError, SpecError, TableError
from batchllm_operator.plan.advise import advise, format_advice
from batchllm_operator.plan.output_lengths import learn_output_lengths
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_plan, format_status, format_summary
from batchllm_operator.report.page import render_report
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.group_lengths import question_salts
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.spec import JobSpec, SamplingSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

FREE = {"sampling": {"max_tokens": 8}}
MIXED: dict[str, Any] = {
    **PROMPTS,
    "fields": {
        "template": "{document}: {query}",
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    },
    "samples": {"template": "{document}", "sampling": {"temperature": 1.0, "seed": 3, "n": 3}},
    "probable": {"template": "{query}", "sampling": {"logprobs": 2, "max_tokens": 4}},
    "scored": {
        "template": "{query}|{document}",
        "task": "classify",
        "label_values": {"1": 1.0, "2": 2.0, "3": 3.0},
        "calibrate": "prior",
    },
}
"""Every kind of answer that texts have."""


def put(folder: Path, rows: list[dict[str, Any]] | None = None, *partitions: str) -> None:
    for ds in partitions or (DS,):
        write_table(folder / "documents", document_rows() if rows is None else rows, ds)


def compare_with_jobs(spec: JobSpec, ds: str = DS) -> None:
    """The published answers are those of a job for each prompt."""
    together = rows_by_key(spec, ds)
    for name, question in zip(spec.prompts, spec.questions, strict=True):
        single = alone(spec, name)
        run_and_commit(single, ds)
        wanted = rows_by_key(single, ds)
        assert together.keys() == wanted.keys()
        for key, row in together.items():
            for column in set(question.answer_columns) - OF_PLACE:
                assert row[name][column] == wanted[key][column], (name, key, column)
            assert row[name].keys() == set(question.answer_columns)


def test_answers_are_those_of_a_job_for_each_prompt(tmp_path: Path) -> None:
    rows = document_rows()
    rows += [{**rows[3], "row_key": "a copy"}]
    put(tmp_path, rows)
    spec = several(tmp_path, MIXED)
    report = finish(plan := plan_job(spec, DS))
    compare_with_jobs(spec)
    assert plan.manifest.counts.num_rows == report.plan.num_rows == 7 * 31
    assert (report.num_rows_in, report.num_failed_rows) == (31, 0)
    [row] = [row for key, row in rows_by_key(spec).items() if key == "a copy"]
    assert {row["run_id"]} == {plan.publication.run_id} and row["model"] == "no-model"


def test_what_documents_have_in_common_is_computed_once_for_all_prompts(tmp_path: Path) -> None:
    put(tmp_path)
    spec = several(tmp_path, planner={"num_shards": 1})
    report = finish(plan := plan_job(spec, DS))
    singles = {name: run_and_commit(alone(spec, name)) for name in spec.prompts}
    planned = plan.manifest.counts_by_prompt
    for name, single in singles.items():
        counts = single.manifest.counts
        assert planned[name].num_alone_tokens == counts.num_optimal_tokens
        assert planned[name].num_logical_tokens == counts.num_logical_tokens
        assert planned[name].num_requests == counts.num_requests
        assert report.prompts[name].num_logical_tokens == counts.num_logical_tokens
    counts = plan.manifest.counts
    assert sum(p.num_requests for p in planned.values()) == counts.num_requests
    assert sum(p.num_logical_tokens for p in planned.values()) == counts.num_logical_tokens
    num_alone = sum(p.num_alone_tokens for p in planned.values())
    assert counts.num_optimal_tokens < num_alone
    computed = sum(p.num_computed_tokens for p in report.prompts.values())
    assert computed == report.done.num_computed_tokens
    assert report.saving_against_jobs == pytest.approx(1 - computed / num_alone)
    assert (
        report.figures()["prompts"]["topic"]["num_alone_tokens"]
        == planned["topic"].num_alone_tokens
    )


TEXTS = st.text("ab", max_size=3)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), max_size=8)
ASKED: dict[str, Any] = {
    "first": {"template": "{document}{query}", **FREE},
    "longer": {"template": "{document}{query}b", **FREE},
    "sampled": {"template": "{query}", "sampling": {"temperature": 1.0, "max_tokens": 8}},
    "short": {"template": "{query}", "sampling": {"max_tokens": 3}},
    "same": {"template": "{document}{query}", **FREE},
}
"""Prompts that begin like others, are equal to others, or are empty."""


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS, st.integers(1, 4))
@example([("a", "b"), ("ab", ""), ("", "ab"), ("", "")], 2)
@example([], 1)
def test_each_ask_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]], num_shards: int
) -> None:
    folder = tmp_path_factory.mktemp("asks")
    rows = [{"row_key": str(i), "document": d, "query": q} for i, (d, q) in enumerate(texts)]
    put(folder, [*rows, {"row_key": "last", "document": "b", "query": "b"}])
    texts = [*texts, ("b", "b")]
    more = {"num_shards": num_shards, "part_rows": 2}
    spec = several(folder, ASKED, planner=more, max_failed_fraction=1.0)
    plan = plan_job(spec, DS)
    names, requests = list(spec.prompts), asks_of(plan)
    asks = Counter(ask for _, asked in requests for ask in asked)
    assert set(asks.values()) == {1}
    wanted = {
        row * len(names) + number: ASKED[name]["template"].format(document=d, query=q)
        for row, (d, q) in enumerate(texts)
        for number, name in enumerate(names)
    }
    assert asks.keys() == {ask for ask, text in wanted.items() if text}
    together = Counter[tuple[int, str]]()
    for token_ids, asked in requests:
        assert {wanted[ask] for ask in asked} == {bytes(token_ids).decode()}
        assert len({ask % len(names) for ask in asked}) == 1, "a request asks one question"
        together[asked[0] % len(names), bytes(token_ids).decode()] += 1
    sampled = names.index("sampled")
    assert all(num == 1 for (number, _), num in together.items() if number != sampled)
    assert sum(num for (n, _), num in together.items() if n == sampled) == sum(
        bool(text) for ask, text in wanted.items() if ask % len(names) == sampled
    ), "samples are drawn for each row"
    finish(plan)
    published = rows_by_key(spec)
    for row, (key, answers) in enumerate(published.items()):
        assert key == [*map(str, range(len(texts) - 1)), "last"][row]
        for number, name in enumerate(names):
            text = wanted[row * len(names) + number]
            assert answers[name]["num_prompt_tokens"] == (len(text) or None)
            assert answers[name]["status"] == ("cut_off" if text else "rejected")


def test_a_row_that_fails_in_one_prompt_keeps_the_other_answers(tmp_path: Path) -> None:
    rows = document_rows(2, 2)
    rows[0]["query"] = None
    rows[1]["query"] = "~"
    put(tmp_path, rows)
    engine = {"backend": "fake", "extra_args": {"error_token_id": ord("~")}}
    plan = plan_job(several(tmp_path, engine=engine, max_failed_fraction=0.34), DS)
    assert plan.manifest.counts.num_rejected_rows == 2
    report = finish(plan)
    assert report.errors_by_kind == {"null_value": 2, "engine_error": 2}
    published = rows_by_key(plan.manifest.spec)
    statuses = {
        key: [row[name]["status"] for name in ("relevant", "summary", "topic")]
        for key, row in published.items()
    }
    assert statuses == {
        "d0-q0": ["rejected", "cut_off", "rejected"],
        "d1-q0": ["failed", "cut_off", "failed"],
        "d0-q1": ["ok", "cut_off", "ok"],
        "d1-q1": ["ok", "cut_off", "ok"],
    }
    assert published["d0-q0"]["topic"]["error"]["message"] == "column 'query' is null"
    found = find_failed_rows(plan.folder.uri, 2)
    null = "column 'query' is null"
    assert found.rows == tuple(
        FailedRow({"row_key": "d0-q0"}, "null_value", null, name) for name in ("relevant", "topic")
    )
    assert (found.num_rows, found.num_failed_rows) == (12, 4)
    [kind] = [each for each in report.errors if each.kind == "null_value"]
    assert kind.example_error == f"relevant: null_value: {null}"


def test_more_failed_answers_than_allowed_are_refused(tmp_path: Path) -> None:
    rows = document_rows(2, 2)
    rows[0]["query"] = rows[1]["query"] = None
    put(tmp_path, rows)
    with pytest.raises(FailedRowsError, match=r"4 of 12 answers failed, 33\.3 %"):
        plan_job(several(tmp_path, max_failed_fraction=0.33), DS)
    assert plan_job(several(tmp_path, max_failed_fraction=0.34), DS).manifest.counts.num_rows == 12


class StoppingEngine(FakeEngine):
    """Is stopped by a signal after some outputs."""

    def stream(self, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        for number, output in enumerate(super().stream(requests)):
            if number == 37:
                raise KeyboardInterrupt
            yield output


def test_a_stopped_run_goes_on_with_what_it_has_finished(tmp_path: Path) -> None:
    put(tmp_path)
    spec = several(tmp_path, MIXED, max_failed_fraction=0)
    plan, asked = plan_job(spec, DS), list[int]()
    with pytest.raises(KeyboardInterrupt):
        run_worker(plan, start=lambda spec, job: StoppingEngine(spec, job.max_model_len))

    class Counting(FakeEngine):
        def _answer(self, request: EngineRequest, *args: Any) -> EngineOutput:
            asked.append(request.request_idx)
            return super()._answer(request, *args)

    def start(spec: JobSpec, job: EngineJob) -> FakeEngine:
        return Counting(spec, job.max_model_len)

    run_worker(plan, start=start)
    assert len(set(asked)) == len(asked) == plan.manifest.counts.num_requests - 37
    commit_run(plan)
    compare_with_jobs(spec)


def test_an_answer_without_its_form_is_tried_again_as_its_prompt_says(tmp_path: Path) -> None:
    put(tmp_path)
    choice = {"response_format": {"type": "choice", "choices": ["yes", "no"]}}
    hot = {"sampling": {"temperature": 1.0, "seed": 1}, **choice}
    prompts = {
        "again": {"template": "{document}{query}", **hot, "retry_invalid": 2},
        "once": {"template": "{document}{query}.", **hot},
    }
    extra_args = {"invalid_every": 2, "invalid_tries": 2}
    engine = {"backend": "fake", "extra_args": extra_args}
    spec = several(tmp_path, prompts, engine=engine, max_failed_fraction=1.0)
    finish(plan_job(spec, DS))
    statuses = Counter(
        (name, row[name]["status"]) for row in rows_by_key(spec).values() for name in prompts
    )
    assert statuses["again", "ok"] == 30
    assert 0 < statuses["once", "invalid_output"] < 30


def test_twenty_prompts_of_one_row(tmp_path: Path) -> None:
    put(tmp_path, document_rows(1, 1))
    prompts = {f"p{n:02d}": {"template": f"{{document}}{n}", **FREE} for n in range(20)}
    spec = several(tmp_path, prompts)
    report = finish(plan_job(spec, DS))
    [row] = rows_by_key(spec).values()
    assert len({row[name]["generated_text"] for name in prompts}) == report.plan.num_rows == 20


def test_adapters_answer_each_prompt(tmp_path: Path) -> None:
    for seed, name in enumerate(("french", "german")):
        write_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": (8, 8)}, seed=seed)
    languages = ["french", "german", None, "klingon"]
    put(
        tmp_path,
        [{**row, "language": languages[n % 4]} for n, row in enumerate(document_rows(4, 2))],
    )
    adapters = {name: str(tmp_path / name) for name in ("french", "german")}
    model = {"path": "no-model", "adapters": adapters, "adapter_column": "language"}
    spec = several(tmp_path, model=model, max_failed_fraction=0.5)
    finish(plan_job(spec, DS))
    compare_with_jobs(spec)


def test_outputs_are_reused_by_prompt(tmp_path: Path) -> None:
    put(tmp_path, None, DS, NEXT)
    spec = several(tmp_path, MIXED | {"samples": PROMPTS["summary"]}, reuse_outputs=True)
    run_and_commit(spec)
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == plan.manifest.counts.num_rows == 7 * 30
    compare_with_jobs(spec.model_copy(update={"reuse_outputs": False}), NEXT)
    longer = {
        **spec.prompts,
        "summary": spec.prompts["summary"].model_copy(
            update={"sampling": SamplingSpec(max_tokens=9)}
        ),
    }
    changed = spec.model_copy(update={"prompts": longer})
    plan = plan_job(changed, NEXT)
    assert plan.manifest.counts.num_reused_rows == 6 * 30
    names = list(spec.prompts)
    assert {names[ask % 7] for _, asked in asks_of(plan) for ask in asked} == {"summary"}


@pytest.mark.parametrize("in_rounds", [False, True])
def test_output_lengths_are_learned_by_prompt(tmp_path: Path, in_rounds: bool) -> None:
    put(tmp_path, None, DS, NEXT)
    prompts: dict[str, Any] = {
        "long": {"template": "{document} a: {query}", "sampling": {"max_tokens": 40}},
        "short": {"template": "{document} b: {query}", "sampling": {"max_tokens": 7}},
    }
    if in_rounds:
        prompts["short"]["when"] = "long.num_prompt_tokens > 0"
    planner = {"estimated_output_tokens": {"learned": True}}
    spec = several(tmp_path, prompts, planner=planner)
    plans = list[StoredPlan]()
    for _ in spec.rounds:
        plans.append(plan_job(spec, DS))
        run_worker(plans[-1])
    commit_run(plans[-1])
    learned = learn_output_lengths(spec, NEXT)
    assert learned is not None
    known = set(learned.hashes.tolist())
    for plan, salt in zip(plans, question_salts(spec), strict=True) if in_rounds else ():
        prefixes = pq.read_table(plan.folder.full_path("groups.parquet"))["prefix_hash"]
        assert {each ^ salt for each in prefixes.drop_null().to_pylist()} <= known
    again = {name: {**fields, "sampling": {"max_tokens": 400}} for name, fields in prompts.items()}
    estimates = set()
    for _ in spec.rounds:
        plan = plan_job(several(tmp_path, again, planner=planner), NEXT)
        assert plan.manifest.learned is not None
        assert plan.manifest.learned.num_known_prefixes == len(known) > 0
        for shard_idx in range(len(plan.manifest.shards)):
            with plan.open_shard(shard_idx) as file:
                table = file.read(["row_idxs", "num_output_tokens"]).to_pylist()
            estimates |= {(row["row_idxs"][0] % 2, row["num_output_tokens"]) for row in table}
        run_worker(plan)
    assert estimates == {(0, 40), (1, 7)}


# One prompt again


def changed(spec: JobSpec, name: str, **fields: Any) -> JobSpec:
    prompt = spec.prompts[name].model_copy(update=fields)
    return spec.model_copy(update={"prompts": {**spec.prompts, name: prompt}})


def test_one_prompt_is_asked_again_and_the_other_answers_are_taken(tmp_path: Path) -> None:
    rows = document_rows()
    rows[4]["query"] = None
    put(tmp_path, rows)
    spec = several(tmp_path, MIXED, max_failed_fraction=0.5)
    run_and_commit(spec)
    before = rows_by_key(spec)
    other = changed(spec, "summary", template="{document}\n\nIn one sentence:")
    rows[1]["document"] = "A new text."
    put(tmp_path, [{**rows[0], "row_key": "new"}, *reversed(rows)])
    plan = plan_job(other, DS, ["summary"])
    # Of a row that is new or has changed, all is asked; of a null value, nothing can be.
    num_asked = 31 + 6 + 5
    assert plan.manifest.counts.num_reused_rows == 31 * 7 - num_asked - 5
    assert plan_job(other, DS).manifest.plan_id != plan.manifest.plan_id
    finish(plan_job(other, DS, ["summary"]))
    after = rows_by_key(other)
    for key in set(before) - {rows[1]["row_key"]}:
        for name in spec.prompts:
            is_same = after[key][name] == before[key][name]
            assert is_same == (name != "summary"), (key, name)
        assert after[key]["run_id"] == plan.publication.run_id
    texts = [after[key]["topic"]["generated_text"] for key in ("new", rows[0]["row_key"])]
    assert texts[0] == texts[1]


def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    put(tmp_path)
    spec = several(tmp_path)
    with pytest.raises(TableError, match=r"has not been published.*leave --only out"):
        plan_job(spec, DS, ["summary"])
    plan = run_and_commit(spec)
    with pytest.raises(SpecError, match="no prompt 'sumary' among several"):
        plan_job(spec, DS, ["sumary"])
    with pytest.raises(SpecError, match="names all prompts"):
        plan_job(spec, DS, list(spec.prompts))
    twice = changed(changed(spec, "summary", template="{query}"), "topic", template="{query}")
    with pytest.raises(SpecError, match=r"prompts\.topic has changed, too"):
        plan_job(twice, DS, ["summary"])
    fewer = spec.model_copy(update={"prompts": dict(list(spec.prompts.items())[:2])})
    with pytest.raises(SpecError, match="answers to other prompts"):
        plan_job(fewer, DS, ["summary"])
    single = alone(spec, "summary")
    with pytest.raises(SpecError, match="no prompt 'summary' among several"):
        plan_job(single, DS, ["summary"])
    (Path(plan.folder.path) / "fingerprints.parquet").unlink()
    with pytest.raises(Exception, match=r"is missing.*leave it out"):
        plan_job(spec, DS, ["summary"])


# What is shown


def test_plan_report_and_page_name_the_prompts(tmp_path: Path) -> None:
    put(tmp_path)
    report = finish(plan := plan_job(several(tmp_path, MIXED), DS))
    text = format_plan(plan.manifest, plan.folder.uri)
    assert text.startswith("30 rows times 7 prompts: ")
    assert "summary: 6 requests, " in text and "to compute in a job of its own" in text
    summary, page = format_summary(report), render_report(report)
    assert "30 in, 210 answers to 7 prompts: 210 out" in summary
    assert "of what a job for each prompt would compute" in summary
    for name in MIXED:
        assert f"\n    {name}: " in summary and f'<th scope="row">{name}</th>' in page
    assert {
        "relevant.label",
        "scored.label",
        "topic.generated_text",
    } == report.answers.counts.keys()
    assert {"scored.1", "scored.2", "scored.3"} == report.answers.prior.keys()
    [sample, *_] = report.sample_rows
    assert "summary: fake " in sample.generated_text
    assert "210/210 (100 %) answers, committed" in format_status(read_status(plan))


# What is refused


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ({"query": {"template": "{document}"}}, r"prompts\.query: table .* has a column of that"),
        ({"a": {"template": "{nothing}"}}, r"prompts\.a\.template: .* has no column 'nothing'"),
    ],
)
def test_prompts_that_do_not_fit_the_table_are_refused(
    tmp_path: Path, prompts: dict[str, Any], reason: str
) -> None:
    put(tmp_path)
    with pytest.raises(SpecError, match=reason):
        plan_job(several(tmp_path, prompts, output={"carry": []}), DS)


def test_advice_counts_all_prompts_together(tmp_path: Path) -> None:
    put(tmp_path)
    late: dict[str, Any] = {"template": "{query}: {document}", **FREE}
    spec = several(tmp_path, {**PROMPTS, "late": late, "next": {"template": "{document} {topic}"}})
    advice = advise(spec, DS)
    assert {each.prompt for each in advice.alternatives} == {*PROMPTS, "late"}
    saved = {each.template: each.saving_ratio for each in advice.alternatives}
    best, given = advice.alternatives[0], [each for each in advice.alternatives if each.is_given]
    assert (best.prompt, best.columns) == ("late", ("document", "query"))
    assert len({each.saving_ratio for each in given}) == 1
    shown = format_advice(advice)
    assert f"in one job; a job for each: {advice.alone_saving_ratio:.1%}\n" in shown
    assert f"{best.saving_ratio:7.1%}  late: {json.dumps(best.template)}\n" in shown
    for ratio, template in ((given[0].saving_ratio, None), (best.saving_ratio, best.template)):
        prompts = {**PROMPTS, "late": late if template is None else {**late, "template": template}}
        plan = plan_job(several(tmp_path, prompts), DS).manifest
        assert plan.counts.optimal_saving_ratio == pytest.approx(ratio)
        if template is None:
            num_alone = sum(each.num_alone_tokens for each in plan.prompt_counts)
            alone = 1 - num_alone / plan.counts.num_logical_tokens
            assert advice.alone_saving_ratio == pytest.approx(alone)
    assert saved[late["template"]] == given[0].saving_ratio > alone
