"""An engine that has ended one job takes up another, as if it had been started for it."""

from support.demo_job import Demo

LONG = {"max_tokens": 5, "ignore_eos": True}
SHORT = {"max_tokens": 3, "ignore_eos": True}


def test_the_next_job_finds_nothing_of_the_one_before(demo: Demo) -> None:
    few = {"filter": [{"column": "package", "op": "<", "value": "d"}]}
    first, second = (
        demo.run_job(name, sampling=sampling, input=few).table
        for name, sampling in (("first", LONG), ("second", SHORT))
    )
    assert set(first["num_output_tokens"].to_pylist()) == {5}
    assert set(second["num_output_tokens"].to_pylist()) == {3}
    assert first["num_cached_tokens"].equals(second["num_cached_tokens"])
    texts = (table["generated_text"].to_pylist() for table in (first, second))
    assert all(long.startswith(short) for long, short in zip(*texts, strict=True))


def test_a_job_waits_for_the_requests_of_the_one_before(demo: Demo) -> None:
    refusal, num_unfinished = demo.warm.second_job(demo.write_spec("waits", sampling=LONG))
    assert "the engine still has requests" in refusal
    assert num_unfinished == 0
