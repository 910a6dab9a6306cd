"""Trials one after the other, with the commands' parent and the S3 server that belong to them."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.faults.damage import mount_disk, unmount_disk
from benchmarks.faults.inside import read_engine_log
from benchmarks.faults.job import compare, computed_truth
from benchmarks.faults.place import Place
from benchmarks.faults.s3 import FaultyProxy, S3Server
from benchmarks.faults.trial import Outcome, Trial, Usual
from benchmarks.faults.zygote import start_server

_NUM_MEASURED: Final = 2
_TRIALS_PER_LAKE: Final = 12
_S3_EVERY: Final = 6
"""One trial in so many is on S3."""


class Series:
    """Runs trials one after the other, of each kind in turn."""

    def __init__(self, root: Path, seed: int, trial: type[Trial]) -> None:
        """Forks processes: the caller has no thread yet."""
        self._root, self._seed, self._trial = root, seed, trial
        start_server()
        self._server = S3Server()
        self._proxy = FaultyProxy(self._server.address)
        self._num_places = 0
        self._places: dict[tuple[str, bool], tuple[Place, int]] = {}
        self._usual: dict[tuple[str, bool], Usual] = {}

    def trials(self, table_format: str, numbers: range) -> Iterator[Outcome]:
        """The trials of these numbers; a trial doesn't depend on its series."""
        for number in numbers:
            is_s3 = number % _S3_EVERY == _S3_EVERY - 1
            turn = number // _S3_EVERY if is_s3 else number - number // _S3_EVERY
            kinds = self._trial.on_s3 if is_s3 else self._trial.on_disk
            usual = self._measured(table_format, is_s3)
            place = self._place(table_format, is_s3)
            rng = random.Random(f"{self._seed} {table_format} {number}")
            proxy = self._proxy if is_s3 else None
            trial = self._trial(kinds[turn % len(kinds)], place, usual, proxy, rng)
            outcome = trial.run()
            if outcome.has_failed:
                del self._places[table_format, is_s3]  # left to be looked into
            yield outcome

    def close(self) -> None:
        """End what was started and remove what was written, but for lakes with a fault in them."""
        for place, _ in self._places.values():
            self._remove(place)
        self._server.close()

    def _measured(self, table_format: str, is_s3: bool) -> Usual:
        """Undisturbed jobs in a clean lake: their outputs are right, and they say how long commands
        take.
        """
        if (usual := self._usual.get((table_format, is_s3))) is not None:
            return usual
        usual = self._usual[table_format, is_s3] = Usual()
        place = self._new_place(table_format, is_s3)
        for version in range(_NUM_MEASURED):
            place.new_input(version)
            for stage, args in _all_stages(place):
                self._proxy.arm()
                started_at = time.monotonic()
                child = place.start(*args)
                if (code := place.end(child)) != 0:
                    raise RuntimeError(f"undisturbed, {stage} ended with {code}: see {place.log}")
                usual.seconds[stage] = time.monotonic() - started_at
                usual.requests[stage] = max(1, self._proxy.num_seen)
                writes = Path(f"{place.engine_log}.writes")
                usual.writes[stage] = int(writes.read_text() or 0)
            rows = place.tables.output().to_pylist()
            if compare(rows, computed_truth(version)):
                raise RuntimeError(f"undisturbed, the outputs are wrong: see {place.root}")
            finished = read_engine_log(place.engine_log).finished
            assert set(finished.values()) == {1}, "nothing is generated twice"
        self._remove(place)
        return usual

    def _place(self, table_format: str, is_s3: bool) -> Place:
        """A lake for the next trial: new ones now and then."""
        key = (table_format, is_s3)
        place, num_trials = self._places.pop(key, (None, 0))
        if place is not None and num_trials == _TRIALS_PER_LAKE:
            self._remove(place)
            place, num_trials = None, 0
        place = place or self._new_place(table_format, is_s3)
        self._places[key] = (place, num_trials + 1)
        return place

    def _new_place(self, table_format: str, is_s3: bool) -> Place:
        self._num_places += 1
        root = self._root / f"{table_format}-{self._num_places}"
        root.mkdir(parents=True)
        if not is_s3:
            mount_disk(root)
        endpoints = (self._proxy.endpoint, f"http://{self._server.address}") if is_s3 else None
        return Place(root, table_format, self._trial.job, endpoints)

    def _remove(self, place: Place) -> None:
        unmount_disk(place.root)
        place.remove()


def _all_stages(place: Place) -> Iterator[tuple[str, list[str]]]:
    yield "plan", place.plan_args()
    yield from place.stages(place.plan_uri()).items()
