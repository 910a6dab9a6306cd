"""Conditions on rows: as text, as a list, and which rows meet them."""

import pyarrow as pa
import pytest
from support.fake_job import fake_spec, job_fields

from batchllm_operator.errors import SpecError, TableError
from batchllm_operator.lake import rows_meeting
from batchllm_operator.spec import FilterTerm, parse_spec


def parsed(condition: object) -> tuple[FilterTerm, ...]:
    fields = job_fields("/lake")
    fields["input"] = {**fields["input"], "filter": condition}
    return parse_spec(fields, source="spec").input.filter


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("language == 'nl'", [{"column": "language", "value": "nl"}]),
        ('topic.label != "a b"', [{"column": "topic.label", "op": "!=", "value": "a b"}]),
        ("votes >= -3.5", [{"column": "votes", "op": ">=", "value": -3.5}]),
        ("is_new == true", [{"column": "is_new", "value": True}]),
        ("votes is null", [{"column": "votes", "op": "is null"}]),
        ("votes is not null", [{"column": "votes", "op": "is not null"}]),
        ("tag not in ['a', 'b']", [{"column": "tag", "op": "not in", "value": ["a", "b"]}]),
        (
            "a > 1 and (b is null or b < 2) and c in (1,)",
            [
                {"column": "a", "op": ">", "value": 1},
                {"any": [{"column": "b", "op": "is null"}, {"column": "b", "op": "<", "value": 2}]},
                {"column": "c", "op": "in", "value": [1]},
            ],
        ),
        ("a == 1 or b == 2", [{"any": [{"column": "a", "value": 1}, {"column": "b", "value": 2}]}]),
    ],
)
def test_a_text_is_the_same_as_the_list_of_its_conditions(
    text: str, terms: list[dict[str, object]]
) -> None:
    assert parsed(text) == parsed(terms)
    spec = fake_spec("/lake")
    again = parse_spec(spec.model_dump(mode="json"), source="stored")
    assert again.identity == spec.identity


@pytest.mark.parametrize(
    "text",
    [
        *("", "language", "language == other", "'nl' == language", "1 == 1", "not a == 1"),
        *("1 < a < 3", "a == null", "a is 3", "a == 1 or b == 2 and c == 3", "f(a) == 1"),
        *("a[0] == 1", "a == f'{b}'", "class == 1", "a == 1; b", "a = 1", "(" * 500),
    ],
)
def test_a_text_that_is_no_condition_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(SpecError, match=r"input\.filter: isn't a condition: write COLUMN == VALUE"):
        parsed(text)


def test_a_list_for_one_value_is_refused_in_a_text_too() -> None:
    with pytest.raises(SpecError, match="'in' and 'not in' take a list"):
        parsed("a in 'nl'")


def test_rows_meet_conditions_as_a_scan_has_them() -> None:
    rows = pa.RecordBatch.from_pydict(
        {"n": [1, 2, None, 4], "topic.label": ["a", None, "a", "b"], "other": [b"", b"", b"", b""]}
    )
    where = "prompts.summary.when: table t"

    def meeting(text: str) -> list[bool]:
        meets: list[bool] = rows_meeting(where, parsed(text), rows).tolist()
        return meets

    assert meeting("n >= 2") == [False, True, False, True]
    assert meeting("topic.label == 'a'") == [True, False, True, False]
    assert meeting("topic.label != 'a'") == [False, False, False, True]  # null is unknown
    assert meeting("n is null or topic.label is null") == [False, True, True, False]
    assert meeting("n > 1 and topic.label == 'b'") == [False, False, False, True]
    assert rows_meeting(where, (), rows).all()
    assert rows_meeting(where, parsed("n > 1"), rows.slice(0, 0)).tolist() == []
    with pytest.raises(TableError, match=r"when: table t: column 'n' holds int64, which can't be"):
        meeting("n == 'a'")
