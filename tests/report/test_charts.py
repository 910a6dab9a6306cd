"""The prefix tree as boxes, and workers over time."""

import pytest

from batchllm_operator.prefixes.sharing import TreeNode
from batchllm_operator.report.charts import WIDTH, boxes, gantt, tree_rows
from batchllm_operator.stored_plan.timeline import WorkBar


def node(level: int, num_requests: int, num_tokens: int, num_saved: int) -> TreeNode:
    return TreeNode(
        level=level,
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_saved_tokens=num_saved,
    )


TREE = (
    *(node(0, 10, 0, 100), node(1, 6, 10, 80), node(2, 4, 5, 20), node(2, 2, 10, 10)),
    node(1, 3, 10, 20),
)


def test_boxes_close_where_the_next_one_is_not_inside() -> None:
    drawn = list(boxes(TREE))
    assert [list(box.rests) for box in drawn] == [[], [], [0], [0, 0], [0, 1]]
    assert sum(len(box.rests) for box in drawn) == len(TREE)
    assert [box.share.replace("\xa0", " ") for box in drawn[:3]] == ["0.0 %", "50.0 %", "15.0 %"]
    assert [box.depth for box in drawn[:2]] == [0.0, 0.4]
    assert list(boxes(())) == []


def test_the_table_has_what_saves_most_first() -> None:
    rows = tree_rows(TREE)
    assert [row[:4] for row in rows] == [
        ("10 tokens", "6", "1", "50"),
        ("10 tokens", "3", "1", "20"),
        ("5 tokens", "4", "2", "15"),
        ("10 tokens", "2", "2", "10"),
    ]


def bar(worker: int, start_s: float, end_s: float, **changes: object) -> WorkBar:
    fields = {"host": "a", "shard_idx": 0, "attempt": 1, "ending": "finished", **changes}
    return WorkBar(worker=worker, start_s=start_s, end_s=end_s, **fields)


def test_bars_lie_where_their_time_is_and_say_who_took_over() -> None:
    chart = gantt(
        [
            bar(0, 0, 50),
            bar(0, 50, 100, shard_idx=1, ending="failed"),
            bar(1, 120, 200, shard_idx=1, attempt=2, host="b"),
        ]
    )
    assert chart is not None and chart.num_taken_over == 1
    (name, first), (_, second) = chart.lanes
    assert name == "worker 0"
    assert [(drawn.x, drawn.width, drawn.colour) for drawn in (*first, *second)] == [
        (0.0, WIDTH / 4, "decode"),
        (WIDTH / 4, WIDTH / 4, "limit"),
        (0.6 * WIDTH, 0.4 * WIDTH, "distinct"),
    ]
    assert second[0].text == "shard 1, attempt 2: 2 min 00 s to 3 min 20 s, finished"
    assert [(row[5], row[6]) for row in chart.rows] == [("none", "1 failed"), ("1", "none")]
    assert gantt([]) is None


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_workers_of_one_number_are_told_apart_by_their_hosts(hosts: str) -> None:
    chart = gantt([bar(0, 0, 5, host=hosts[0]), bar(0, 0, 5, host=hosts[1])])
    assert chart is not None
    names = ["worker 0 on a", "worker 0 on b"] if hosts == "ab" else ["worker 0"]
    assert [name for name, _ in chart.lanes] == names
