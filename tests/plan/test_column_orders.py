"""Templates taken apart and put together in other orders."""

from __future__ import annotations

from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.plan.column_orders import column_orders
from batchllm_operator.spec import template_columns


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
    given = (template, ("body", "query"))
    assert list(column_orders(template)) == [given, (turned, ("query", "body"))]


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
