"""An answer that repeats itself ends early, and says so."""

from support.demo_job import Demo

SAMPLING = {"max_tokens": 48, "ignore_eos": True}
LIMIT = {"stop_repetition": {"tokens": 6, "times": 3}}
FIRST = {"filter": [{"column": "package", "op": "<", "value": "h"}]}


def test_an_answer_ends_where_it_begins_to_repeat_itself(demo: Demo) -> None:
    whole = demo.run_job("whole", sampling=SAMPLING, input=FIRST).table.to_pylist()
    ended = demo.run_job("ended", sampling=SAMPLING | LIMIT, input=FIRST).table.to_pylist()
    is_short = [row["num_output_tokens"] < SAMPLING["max_tokens"] for row in ended]
    assert any(is_short)
    for row, other, short in zip(ended, whole, is_short, strict=True):
        assert other["generated_text"].startswith(row["generated_text"].rstrip("\ufffd"))
        assert (row["finish_reason"] == "repetition") == (row["status"] == "repetition")
        assert row["status"] == "repetition" or not short
        assert row["error"] is None
