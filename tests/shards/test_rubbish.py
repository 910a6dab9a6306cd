"""Whatever lies where a file of ours should be: it is read as what it is, or refused by a typed
error, and never trusted half."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fake_job import DS, document_rows, planned
from support.levels import examples
from support.staged_job import claim_attempt

from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import BatchLLMError, PlanError
from batchllm_operator.inspect.verify import record_plan, verify_plan
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import Claim, ShardProgress
from batchllm_operator.shards.parts import PART_SCHEMA, PartEntry, PartOutputs, ShardFiles
from batchllm_operator.shards.reports import Committed, ShardReport
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import PlanManifest
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan, job_folder

DEEP = b"[" * 100_000
HALF_A_PAIR = b'{"plan_id": "\\ud800"}'

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(),
    st.sampled_from(["\ud800", "\0", "../..", "/", "attempt-00001/x", 10**400, "1", "\u0661"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def rubbish(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes that are, or are near to, the JSON object `whole`."""
    fields: dict[str, Any] = json.loads(whole)
    name = draw(st.sampled_from(sorted(fields)))
    match draw(st.sampled_from(["noise", "cut", "flipped", "changed", "without", "more", "other"])):
        case "noise":
            return draw(st.binary())
        case "cut":
            return whole[: draw(st.integers(0, len(whole) - 1))]
        case "flipped":
            at = draw(st.integers(0, len(whole) - 1))
            return (
                whole[:at] + bytes([whole[at] ^ (1 << draw(st.integers(0, 7)))]) + whole[at + 1 :]
            )
        case "changed":
            return json.dumps(fields | {name: draw(values)}).encode()
        case "without":
            return json.dumps({n: value for n, value in fields.items() if n != name}).encode()
        case "more":
            return json.dumps(fields | {draw(st.text()): draw(values)}).encode()
    return json.dumps(draw(values)).encode()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> ShardFiles:
    """Two attempts that have the same part, of which the later one's entry is to be spoilt."""
    folder = Folder.open(str(tmp_path_factory.mktemp("rubbish") / "shard-00000"))
    files = ShardFiles(folder, "0123456789abcdef", 0, PART_SCHEMA)
    for _ in range(2):
        output = EngineOutput(7, "text", "stop", 10, 4, 2, None)
        files.write_part(claim_attempt(folder), 0, PartOutputs({7: output}, {7: [3, 4]}, 1.25))
    folder.write_bytes("whole.json", folder.read_bytes("attempt-00002/part-00000.json"))
    return files


@given(data=st.data())
@settings(max_examples=examples(300))
def test_a_ledger_of_rubbish_is_right_or_refused(shard: ShardFiles, data: st.DataObject) -> None:
    folder = shard.folder
    whole = folder.read_bytes("whole.json")
    content = data.draw(st.one_of(rubbish(whole), st.sampled_from([DEEP, HALF_A_PAIR])))
    folder.write_bytes("attempt-00002/part-00000.json", content)
    try:
        [(part_idx, entry)] = shard.ledger().items()
    except PlanError as error:  # of another version, or another program's
        assert "attempt-00002/part-00000.json: is" in str(error)
        return
    assert (part_idx, entry.part_idx, entry.plan_id) == (0, 0, "0123456789abcdef")
    file = folder.read_bytes(entry.path)
    assert hashlib.sha256(file).hexdigest() == entry.sha256
    assert 0 <= entry.num_failed_rows < 1 << 63 and entry.engine_s >= 0


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StoredPlan:
    """A plan of one shard that is finished; it isn't committed."""
    lake = tmp_path_factory.mktemp("lake")
    plan = planned(lake, document_rows(2, 2), planner={"num_shards": 1})
    run_worker(plan)
    return plan


LAKE = Path(__file__).parents[1] / "data" / "lake-0.1.0"
FILES: list[tuple[type[StoredJson], str]] = [
    (PlanManifest, "manifest.json"),
    (RunReport, "plan-*/report.json"),
    (Committed, "committed.json"),
    (ShardReport, "shard-00000/report.json"),
    (ShardProgress, "shard-00000/*/progress.json"),
    (Claim, "shard-00000/*/claim.json"),
    (PartEntry, "shard-00000/*/part-00000.json"),
]


@pytest.mark.parametrize(("kind", "pattern"), FILES, ids=[kind.__name__ for kind, _ in FILES])
@given(data=st.data())
def test_a_stored_file_is_whole_or_refused_in_one_line(
    kind: type[StoredJson], pattern: str, data: st.DataObject
) -> None:
    [path] = LAKE.rglob(pattern)
    stored = kind.from_bytes(path.read_bytes(), source="x")
    whole = stored.to_bytes()  # later releases add fields
    assert kind.from_bytes(whole, source="x") == stored
    content = data.draw(st.one_of(rubbish(whole), st.sampled_from([DEEP, HALF_A_PAIR])))
    try:
        kind.from_bytes(content, source="rubbish")
    except PlanError as error:
        assert str(error).startswith(f"{kind.what} rubbish: ") and "\n" not in str(error)


@given(data=st.data())
@example(data=None)
def test_a_plans_record_is_whole_or_refused(plan: StoredPlan, data: st.DataObject | None) -> None:
    spec = plan.manifest.spec
    record_plan(spec, DS, "pod", {"plan_uri": plan.folder.uri})
    folder = job_folder(spec, DS).child("records")
    content = DEEP
    if data is not None:
        whole = folder.read_bytes("pod.json")
        names = st.sampled_from(["\0", "\ud800", "", "x" * 5000, "nosuch://x", Path("/dev/null")])
        spoilt = names.map(lambda uri: whole.replace(plan.folder.uri.encode(), dumped(str(uri))))
        content = data.draw(st.one_of(rubbish(whole), spoilt))
    folder.write_bytes("pod.json", content)
    try:
        found = verify_plan(spec, DS, "pod")
    except BatchLLMError:
        return
    assert found["plan_uri"] == plan.folder.uri


def dumped(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode()
