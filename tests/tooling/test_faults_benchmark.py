"""The benchmark of faults: its checks can fail."""

from collections import Counter
from functools import partial
from pathlib import Path

from support.benchmark_modules import load


def test_rows_that_are_not_as_they_should_be_are_counted() -> None:
    job = load("faults.job")
    truth = job.computed_truth(1)
    rows = [
        {"row_key": key, "generated_text": text, "query": query, "error": None, "run_id": "a"}
        for key, (text, query) in truth.items()
    ]
    assert job.is_whole(rows, truth)
    assert not job.compare(rows, truth)
    assert job.compare(rows[1:], truth) == job.Differences(lost=1)
    assert job.compare([*rows, rows[0]], truth) == job.Differences(duplicate=1)
    altered = [{**rows[0], "generated_text": "other"}, *rows[1:]]
    assert job.compare(altered, truth) == job.Differences(wrong=1)
    foreign = [*rows, {**rows[0], "row_key": "nobody's"}]
    assert job.compare(foreign, truth) == job.Differences(wrong=1)
    assert not job.is_whole([{**rows[0], "run_id": "b"}, *rows[1:]], truth)
    assert not job.is_whole(rows, None)
    assert job.is_whole([], None)


def test_a_worker_loses_finished_rows_only_by_a_kill_or_a_fence() -> None:
    trial, worker_trial = load("faults.trial"), load("faults.worker_trial")
    hand = partial(worker_trial.Hand, child=None, number=0, owner=None)
    live, killed, zombie = hand(), hand(may_be_killed=True), hand(may_be_fenced=True)
    kill, fence = trial.KILL_COSTS, trial.FENCE_COSTS
    for each, most in ((live, 0), (killed, kill), (zombie, fence)):
        assert [each.overpaid(Counter({3: most + more}), 0) for more in (0, 1)] == [0, 1]
    two_shards = Counter({3: kill, 4: 1})
    assert (killed.overpaid(two_shards, 0), zombie.overpaid(two_shards, 0)) == (1, 0)
    assert (live.overpaid(two_shards, 1), killed.overpaid(two_shards, 1)) == (kill + 1, 0)


def test_each_process_has_its_own_rows_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a 0 7\na 1 7\nw 1 8\na 2 7\na 0 8\nw -1 8\na 1 8\nw 1 7\n")
    found = load("faults.inside").read_engine_log(log)
    assert found.finished == Counter({0: 2, 1: 2, 2: 1})
    assert found.finished_by == {7: Counter([0, 1, 2]), 8: Counter([0, 1])}
    assert found.beside_spills == Counter({8: 1})


def test_what_the_product_never_may_do_fails_a_trial() -> None:
    trial = load("faults.trial")
    assert not trial.Outcome("kill_run", kills=1, reader_errors=1, regenerated_rows=1).has_failed
    for name in trial.FATAL:
        assert trial.Outcome("kill_run", **{name: 1}).has_failed, name
    assert {"lost_rows", "half_commits", "zombies_published", "overpaid_rows"} <= set(trial.FATAL)
