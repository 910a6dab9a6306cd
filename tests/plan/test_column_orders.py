"""Templates taken apart and put together in other orders."""

from __future__ import annotations

from itertools import permutations
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.plan.rows.column_orders import column_orders, take_apart
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
    pieces = take_apart(template)
    assert pieces.columns == ("body", "query")
    assert pieces.template((0, 1)) == template
    assert pieces.template((1, 0)) == turned


@pytest.mark.parametrize("template", ["no columns {{}}", "{only}", "Say {only} twice"])
def test_nothing_to_reorder(template: str) -> None:
    pieces = take_apart(template)
    (order,) = column_orders(len(pieces.columns))
    assert pieces.template(order) == template


def test_a_column_that_is_placed_twice_has_two_pieces() -> None:
    pieces = take_apart("{a} {b} {a}")
    assert pieces.columns == ("a", "b", "a")
    templates = {pieces.template(order) for order in column_orders(3)}
    assert templates == {"{a} {b} {a}", "{b} {a} {a}", "{a} {a} {b}"}


LITERALS = st.text(st.sampled_from("ab{}<>/|:. \n\tä"), max_size=12)


@given(st.lists(st.tuples(LITERALS, st.sampled_from("xyz")), min_size=1, max_size=4), LITERALS)
def test_no_order_loses_or_adds_a_character(places: list[tuple[str, str]], tail: str) -> None:
    def escape(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    template = "".join(f"{escape(text)}{{{column}}}" for text, column in places) + escape(tail)
    pieces = take_apart(template)
    for order in permutations(range(len(places))):
        turned = pieces.template(order)
        assert sorted(turned) == sorted(template)
        assert template_columns(turned) == tuple(dict.fromkeys(places[idx][1] for idx in order))
    assert pieces.template(range(len(places))) == template


@pytest.mark.parametrize("num", range(5))
def test_few_columns_are_tried_in_every_order(num: int) -> None:
    orders = list(column_orders(num))
    assert orders[0] == tuple(range(num))
    assert len(set(orders)) == len(orders) == factorial(num)


def test_of_many_columns_each_is_tried_first() -> None:
    orders = list(column_orders(6))
    assert [order[0] for order in orders] == list(range(6))
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders[3] == (3, 0, 1, 2, 4, 5)
