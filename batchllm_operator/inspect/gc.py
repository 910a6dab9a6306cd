"""Removes old files of jobs, but never what may still be needed (ADR 19).

A plan is as old as its newest file, because work on a plan leaves recent files: a run writes parts,
planning again writes all files.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote

from batchllm_operator.errors import PlanError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.shards.reports import COMMITTED_FILE, find_committed
from batchllm_operator.spec import JobSpec, TableAddress
from batchllm_operator.storage import Folder, StoredFile, list_files, remove_files
from batchllm_operator.stored_plan.manifest import (
    FINGERPRINTS_FILE,
    GROUPS_FILE,
    MANIFEST_FILE,
    REUSED_FILE,
)
from batchllm_operator.stored_plan.rounds import INPUT_FILE, plans_of_rounds
from batchllm_operator.stored_plan.stored_plan import (
    COMMITTING_FILE,
    PLAN_FOLDER,
    STAGED_FOLDER,
    SUPERSEDED_FILE,
    StoredPlan,
    check_publisher,
    job_folder,
    job_root,
)

_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
"""Temporary files of `Folder` on local disk; on S3 there are none."""
_SHARD: Final = re.compile(r"shard-[0-9]+\.parquet")
_ROWS: Final = re.compile(r"rows(-[0-9]+)?\.parquet")

Files = Mapping[str, StoredFile]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Files of a folder that may be removed."""

    folder: Folder
    what: str
    files: Files
    """By name relative to the folder, in the order of removal."""
    seen: Files | None = None
    """All files of the folder; if they have changed by the time of removal, nothing is removed."""

    @property
    def num_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def modified_at(self) -> float:
        """When the newest was written, in seconds since 1970."""
        return max(file.modified_at for file in self.files.values())


@dataclass(frozen=True, slots=True)
class Kept:
    """A plan that is old enough, but kept."""

    folder: Folder
    why: str


def find_garbage(
    spec: JobSpec, *, before: float, ds: str | None = None
) -> tuple[list[Garbage], list[Kept]]:
    """Find removable files among a job's plans, records and temporary files; read-only.

    Args:
        before: seconds since 1970; what has changed since then is kept.
        ds: the only partition to search; None for all.

    Raises `SpecError`: the output table's address is wrong, or the storage doesn't tell when files
    were written.
    """
    root = job_root(spec)
    folders = [root.child(name) for name in root.subfolder_names()]
    garbage: list[Garbage | None] = []
    kept: list[Kept] = []
    for folder in folders if ds is None else [job_folder(spec, ds)]:
        plans: dict[str, dict[str, StoredFile]] = defaultdict(dict)
        loose: dict[str, StoredFile] = {}
        for name, file in list_files(folder).items():
            top, _, rest = name.partition("/")
            if rest and PLAN_FOLDER.fullmatch(top):
                plans[top][rest] = file
            elif top == "records" or STAGED_FOLDER.fullmatch(top) or _is_temporary(folder, name):
                loose[name] = file
        found = {name: _of_plan(spec, folder.child(name), plans[name], before) for name in plans}
        goes_on = [
            name
            for name, files in plans.items()
            if not isinstance(found[name], Garbage)
            and not files.keys() & {COMMITTED_FILE, SUPERSEDED_FILE}
        ]
        needed = _needed(folder, goes_on)
        for name, files in plans.items():
            plan = found[name]
            if isinstance(plan, Garbage) and name in needed:
                plan = Kept(plan.folder, "a later round needs its outputs")
            if isinstance(plan, Kept):
                kept.append(plan)
            garbage.append(
                plan if isinstance(plan, Garbage) else _temporary(folder.child(name), files, before)
            )
        garbage.append(_old(folder, "records and temporary files", loose, before))
    for folder in _table_folders(spec, ds):
        garbage.append(_temporary(folder, list_files(folder), before))
    return [files for files in garbage if files is not None], kept


def remove_garbage(garbage: Sequence[Garbage]) -> tuple[list[Garbage], list[Kept]]:
    """Remove what hasn't changed since it was found; returns what was removed, and what was kept.

    Raises `StorageError`: the storage fails; the rest will be found again.
    """
    removed: list[Garbage] = []
    kept: list[Kept] = []
    for files in garbage:
        if files.seen is not None and list_files(files.folder) != files.seen:
            kept.append(Kept(files.folder, "it has changed meanwhile"))
        elif _has_begun_again(files):
            kept.append(Kept(files.folder, "work on it has begun again"))
        else:
            remove_files(files.folder, files.files)
            removed.append(files)
    return removed, kept


def _has_begun_again(garbage: Garbage) -> bool:
    """Remove the manifest, so that the rest is no plan, then check whether work has begun again.

    A process that works on a plan writes a file, then looks for the manifest. So either it finds
    the manifest gone, or its file is found here and the manifest restored.
    """
    if garbage.seen is None or MANIFEST_FILE not in garbage.files:
        return False
    try:
        manifest = garbage.folder.read_bytes(MANIFEST_FILE)
    except FileNotFoundError:
        return False
    garbage.folder.remove(MANIFEST_FILE)
    rest = {name: file for name, file in garbage.seen.items() if name != MANIFEST_FILE}
    if list_files(garbage.folder) == rest:
        return False
    garbage.folder.create(MANIFEST_FILE, manifest)
    return True


def _of_plan(spec: JobSpec, folder: Folder, files: Files, before: float) -> Garbage | Kept | None:
    """The removable files of a plan; None if there are none yet."""
    if any(file.modified_at >= before for file in files.values()):
        return None
    try:
        is_published, is_committed = _state(spec, folder, files)
    except PlanError as error:
        return Kept(folder, f"what it is isn't known: {error}")
    except TableError as error:
        return Kept(folder, f"whether it is published isn't known: {error}")
    if not is_published:
        what = "was never published" if MANIFEST_FILE in files else "was never completed"
        if SUPERSEDED_FILE in files or COMMITTED_FILE in files:
            what = "another plan has taken its place"
        return Garbage(folder, what, files, files)
    if not is_committed:
        return Kept(folder, f"it is published, without a {COMMITTED_FILE}: commit it once more")
    chosen = {
        name: file
        for name, file in files.items()
        if name.startswith("runs/")
        or name in (INPUT_FILE, FINGERPRINTS_FILE, GROUPS_FILE, REUSED_FILE, COMMITTING_FILE)
        or _ROWS.fullmatch(name)
        or _SHARD.fullmatch(name)
        or _is_temporary(folder, name)
    }
    return Garbage(folder, "is published: parts and shards", chosen, files) if chosen else None


def _needed(folder: Folder, names: Iterable[str]) -> set[str]:
    """Names of the plans of rounds before those of some plans."""
    needed = set[str]()
    for name in names:
        with suppress(PlanError):  # not a plan yet, or one that can't go on
            plans = plans_of_rounds(StoredPlan.open(folder.child(name).uri))
            needed |= {f"plan-{plan.manifest.plan_id}" for plan in plans[:-1]}
    return needed


def _state(spec: JobSpec, folder: Folder, files: Files) -> tuple[bool, bool]:
    """Whether the output partition holds the plan's rows, and whether the plan's note says so."""
    if MANIFEST_FILE in files:
        plan = StoredPlan.open(folder.uri)
        spec, ds, plan_id = plan.manifest.spec, plan.manifest.ds, plan.manifest.plan_id
    else:
        plan, name = None, PurePosixPath(folder.path)
        ds, plan_id = unquote(name.parent.name), name.name.removeprefix("plan-")
    table = open_table(spec.output.uri, spec.input.partition_column)
    published = check_publisher(table, spec, ds)
    is_published = published is not None and published.plan_id == plan_id
    return is_published, is_published and plan is not None and find_committed(plan) is not None


def _table_folders(spec: JobSpec, ds: str | None) -> Iterator[Folder]:
    """Folders of the output table's partitions, where a killed commit may leave its file."""
    location = TableAddress.parse(spec.output.uri).folder
    if location is None or not (table := Folder.open(location)).is_local:
        return
    for name in table.subfolder_names():
        column, _, value = name.partition("=")
        if unquote(column) == spec.input.partition_column and ds in (None, unquote(value)):
            yield table.child(name)


def _temporary(folder: Folder, files: Files, before: float) -> Garbage | None:
    chosen = {name: file for name, file in files.items() if _is_temporary(folder, name)}
    return _old(folder, "temporary files", chosen, before)


def _old(folder: Folder, what: str, files: Files, before: float) -> Garbage | None:
    """The files that are old enough, each judged by itself; None if there are none."""
    old = {name: file for name, file in files.items() if file.modified_at < before}
    return Garbage(folder, what, old) if old else None


def _is_temporary(folder: Folder, name: str) -> bool:
    return folder.is_local and _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None
