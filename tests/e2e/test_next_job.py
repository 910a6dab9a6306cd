"""An engine that has ended one job takes up another, as if it had been started for it."""

from __future__ import annotations

from support.demo_job import Demo


def test_the_next_job_finds_nothing_of_the_one_before(demo: Demo) -> None:
    sampling = {"max_tokens": 5, "ignore_eos": True}
    engine = {"max_num_seqs": 1}  # one after the other, so that the first to end leaves others
    result = demo.run_script("two_jobs", demo.write_spec("next", sampling=sampling, engine=engine))
    first, second = result["jobs"]
    assert [each[0] for each in first] == [5] * 4
    assert [each[0] for each in second] == [3] * 4
    # Both find the prefix of the request before, and neither one of another job's.
    assert [each[1] for each in first] == [each[1] for each in second] == [0, 96, 96, 96]
    assert all(a[2].startswith(b[2]) for a, b in zip(first, second, strict=True))
    assert result["early"] == "the engine still has requests"
    assert result["rest"] == 3
