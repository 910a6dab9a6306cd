"""A bare install: each command works, or says in one line which extra it needs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.fake_job import DS, document_rows, write_job, write_table

BARE = """
import contextlib, importlib.abc, io, json, sys

MISSING = (
    *("airflow", "aiobotocore", "botocore", "deltalake", "matplotlib", "pyiceberg", "s3fs"),
    *("torch", "transformers", "vllm"),
)

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from batchllm_operator.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(err):
        code = main(arguments)
    found.append([arguments[0], code, err.getvalue()])
print(json.dumps(found))
"""


def arguments(folder: Path, name: str, **changes: Any) -> list[str]:
    path = write_job(folder, name=name, planner={"num_shards": 1}, **changes)
    return ["--job", str(path), "--ds", DS]


def test_every_command_works_or_names_the_extra(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    job = arguments(tmp_path, "job")
    delta = arguments(tmp_path, "delta", output={"uri": "delta+./delta"})
    iceberg = {"uri": "iceberg://c/n.t", "staging_uri": "./iceberg"}
    works = [
        ["schema"],
        ["plan", *job],
        ["plan", "--advise", *job],
        ["run", *job],
        ["verify", *job],
        ["status", *job],
        ["commit", *job],
        ["report", *job],
        ["gc", *job],
    ]
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    tokens = {"engine": {"extra_args": {"byte_tokens": False}}, "model": {"path": str(tmp_path)}}
    fails = {
        "transformers": [["plan", *arguments(tmp_path, "tokens", **tokens)]],
        "s3fs": [["plan", *arguments(tmp_path, "s3", output={"uri": "s3://bucket/out"})]],
        "vllm": [["simulate"]],
        "deltalake": [["plan", *delta], ["report", *delta]],
        "pyiceberg": [["plan", *arguments(tmp_path, "iceberg", output=iceberg)]],
    }
    commands = [*works, *(each for some in fails.values() for each in some)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", BARE, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    outcomes = iter(json.loads(done.stdout))
    for _ in works:
        command, code, err = next(outcomes)
        assert code == 0, (command, err)
    for library, some in fails.items():
        for _ in some:
            command, code, err = next(outcomes)
            assert code == 2, (command, err)
            [line] = err.splitlines()
            assert line.startswith("batchllm: error: ")
            wanted = ("torch", "vllm") if library == "vllm" else (library,)
            assert any(f"needs the library {each}, which isn't" in line for each in wanted)
            assert "it comes with this package's extra" in line
