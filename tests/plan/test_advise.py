"""Template advice: the planner's own figures for other column orders, and no trace of it."""

import json
from math import factorial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.fake_job import DS, document_rows, fake_spec, job_fields, write_table

from batchllm_operator.errors import EmptyPartitionError, SpecError
from batchllm_operator.plan import advise as advise_module
from batchllm_operator.plan.advise import advise, column_orders, format_advice
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prompts import TokenIdsDifferError, load_tokenizer
from batchllm_operator.spec import template_columns

QUERY_FIRST = {"template": "Query: {query}\nDocument: {document}\nAnswer:"}


def test_each_order_saves_what_a_plan_of_it_would(tmp_path: Path) -> None:
    rows = document_rows(6, 5)
    rows += [{**rows[0], "row_key": "again"}, {**rows[1], "row_key": "null", "query": None}]
    write_table(tmp_path / "documents", rows)
    advice = advise(fake_spec(tmp_path, prompt=QUERY_FIRST), DS)
    assert (advice.num_sampled_rows, advice.num_rows) == (32, 32)
    assert [each.columns for each in advice.alternatives] == [
        ("document", "query"),
        ("query", "document"),
    ]
    assert [each.is_given for each in advice.alternatives] == [False, True]
    assert not (tmp_path / "out").exists(), "advice writes nothing"
    for each in advice.alternatives:
        spec = fake_spec(tmp_path, prompt={"template": each.template})
        manifest = plan_job(spec.model_copy(update={"name": "x"}), DS).manifest
        assert each.saving_ratio == pytest.approx(manifest.counts.optimal_saving_ratio)


def test_token_ids_that_prove_wrong_are_all_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows(6, 5))
    spec = fake_spec(tmp_path, prompt=QUERY_FIRST)
    expected = advise(spec, DS)
    tokenizer = load_tokenizer(spec, DS)
    encode = tokenizer.encode
    num_calls = 0

    def encode_and_find_a_difference(texts: list[str]) -> TokenTable:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise TokenIdsDifferError("30 prompts to encode again")
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode", encode_and_find_a_difference)
    monkeypatch.setattr(advise_module, "load_tokenizers", lambda *_: [tokenizer])
    assert advise(spec, DS) == expected
    assert num_calls == 4


def test_the_first_rows_are_sampled(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(6, 5))
    spec = fake_spec(tmp_path, prompt=QUERY_FIRST)
    first = advise(spec, DS, sample_rows=6)
    assert (first.num_sampled_rows, first.num_rows) == (6, 30)
    # All six are about one query: now the given order is the best.
    assert first.alternatives[0].is_given
    assert advise(spec, DS, sample_rows=6) == first


def test_rows_that_the_filter_drops_are_not_sampled(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(6, 5))
    filtered = [{"column": "query", "value": "question 3"}]
    spec = fake_spec(tmp_path, input={"filter": filtered})
    assert advise(spec, DS).num_sampled_rows == 6


def test_a_template_of_one_column_has_no_other_order(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    advice = advise(fake_spec(tmp_path, prompt={"template": "{query}"}), DS)
    assert [each.is_given for each in advice.alternatives] == [True]
    assert "no two columns" in format_advice(advice)


def test_equal_savings_leave_the_given_order_first(tmp_path: Path) -> None:
    rows = [{"row_key": n, "document": f"{n}", "query": f"{n}"} for n in range(10, 20)]
    write_table(tmp_path / "documents", rows)
    assert advise(fake_spec(tmp_path), DS).alternatives[0].is_given


def test_faults_are_those_of_planning(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    with pytest.raises(SpecError, match=r"prompt\.template: .*'nothing'"):
        advise(fake_spec(tmp_path, prompt={"template": "{nothing}"}), DS)
    with pytest.raises(EmptyPartitionError):
        advise(fake_spec(tmp_path), "2000-01-01")


def test_the_command_prints_templates_and_writes_its_result(
    tmp_path: Path, batchllm: object
) -> None:
    assert callable(batchllm)
    write_table(tmp_path / "documents", document_rows(6, 5))
    job, result = tmp_path / "job.yaml", tmp_path / "result.json"
    job.write_text(yaml.safe_dump(job_fields(".", prompt=QUERY_FIRST)), encoding="utf-8")
    done = batchllm("plan", "--job", job, "--ds", DS, "--advise", "--result", result)
    assert done.code == 0, done.err
    best = '"Document: {document}\\nQuery: {query}\\nAnswer:"'
    as_given = json.dumps(QUERY_FIRST["template"]) + "  (as given)"
    assert done.out.index(best) < done.out.index(as_given)
    assert yaml.safe_load(best) == "Document: {document}\nQuery: {query}\nAnswer:"
    body = json.loads(result.read_text())
    assert body["alternatives"][1]["is_given"]
    assert not (tmp_path / "out").exists()


# Templates taken apart and put together in other orders


@pytest.mark.parametrize(
    ("template", "turned"),
    [
        (
            "Document: {body}\nQuery: {query}\nSnippet:",
            "Query: {query}\nDocument: {body}\nSnippet:",
        ),
        (
            "Answer in one word.\n\nDocument:\n{body}\n\nQuery: {query}",
            "Answer in one word.\n\nQuery: {query}\n\nDocument:\n{body}",
        ),
        ("Say yes or no.\n{body}\n{query}", "Say yes or no.\n{query}\n{body}"),
        ("{body}|{query}", "{query}|{body}"),
        ("Is {body} about {query}?", "about {query} Is {body}?"),
        ("({body}, {query})", "({query}, {body})"),
        ('{{"d": "{body}", "q": "{query}"}}', '{{"q": "{query}", "d": "{body}"}}'),
        ("<doc>{body}</doc>\n<q>{query}</q>", "<q>{query}</q>\n<doc>{body}</doc>"),
        ("<doc>{body}</doc><q>{query}</q> Go:", "<q>{query}</q><doc>{body}</doc> Go:"),
        ("<doc>{body}\n</doc>\n<q>{query}", "<q>{query}\n<doc>{body}\n</doc>"),
        ("{body}{query}", "{query}{body}"),
    ],
)
def test_two_columns_change_places(template: str, turned: str) -> None:
    unturned = (template, ("body", "query"))
    assert list(column_orders(template)) == [unturned, (turned, ("query", "body"))]


@pytest.mark.parametrize("template", ["no columns {{}}", "{only}", "Say {only} twice"])
def test_nothing_to_reorder(template: str) -> None:
    assert list(column_orders(template)) == [(template, template_columns(template))]


def test_a_column_that_is_placed_twice_has_two_pieces() -> None:
    orders = dict(column_orders("{a} {b} {a}"))
    assert set(orders) == {"{a} {b} {a}", "{b} {a} {a}", "{a} {a} {b}"}
    assert orders["{b} {a} {a}"] == ("b", "a", "a")


LITERALS = st.text(st.sampled_from("ab{}<>/|:. \n\tä"), max_size=12)


@given(st.lists(st.tuples(LITERALS, st.sampled_from("xyz")), min_size=1, max_size=4), LITERALS)
def test_no_order_loses_or_adds_a_character(places: list[tuple[str, str]], tail: str) -> None:
    def escape(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    template = "".join(f"{escape(text)}{{{column}}}" for text, column in places) + escape(tail)
    orders = list(column_orders(template))
    assert orders[0] == (template, tuple(column for _, column in places))
    assert len(orders) == factorial(len(places)), "few columns are tried in every order"
    for turned, columns in orders:
        assert sorted(turned) == sorted(template)
        assert template_columns(turned) == tuple(dict.fromkeys(columns))


def test_of_many_columns_each_is_tried_first() -> None:
    orders = ["".join(columns) for _, columns in column_orders("{a}{b}{c}{d}{e}{f}")]
    assert orders == ["abcdef", "bacdef", "cabdef", "dabcef", "eabcdf", "fabcde"]
