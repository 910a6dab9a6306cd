"""The benchmark of peers: what is measured of a command, and what the table says of it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

from support.benchmark_modules import ROOT, load

show = load("peers.show")
_COMMAND = """
import os, subprocess, sys, time
child = "import time; held = bytearray(200 << 20); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
while time.process_time() < 1:
    pass
with open(os.environ["PEERS_METER_FOLDER"] + "/1", "wb") as file:
    file.write(bytes.fromhex(sys.argv[1]))
time.sleep(600)
"""
_DRIVER = """
import json, os, sys
from pathlib import Path
from benchmarks.peers import measured
measured._LINGER_S = 1
measured.adopt_orphans()
command = [sys.executable, *sys.argv[1:]]
print(json.dumps(measured.run(command, os.environ, Path.cwd(), kill_at=10)._asdict()))
"""


def test_a_killed_command_s_leftovers_are_counted_and_end(tmp_path: Path) -> None:
    counts = struct.pack("<4q", 70, 9, 10, 2_000).hex()
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, "-c", _COMMAND, counts],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert found["code"] == -9
    assert found["counts"] == [70, 9, 10, 2_000]
    assert found["num_orphans"] == 1
    assert found["cpu_s"] > 1
    assert found["peak_bytes"] > 200 << 20


def test_rows_of_the_tables() -> None:
    named = {"name": "ours", "version": None}
    whole = {
        **{"generate_s": 10.0, "plan_s": 2.0, "commit_s": 0.5, "wall_s": 30.0, "cpu_s": 41.4},
        **{"num_computed": 250, "peak_bytes": 3 << 29, "equal_texts": 0.995},
    }
    kill = {"num_rows": 40, "num_done": 20, "num_again": 5, "num_computed": 3_000}
    stops = {
        "null": {"num_texts": 0, "num_rows": 19, "code": 1},
        "killed": {**kill, "num_orphans": 2, "num_texts": 39, "code": 0},
    }
    lines = [
        show.markdown({"num_prompt_tokens": 1000, "results": [named | found]}).splitlines()[-1]
        for found in (whole, stops)
    ]
    assert lines == [
        "| BatchLLM Operator | 12.5 | 10.0 | 30.0 | 41 | 250 (25%) | 1.5 GiB | 99.5% |",
        "| BatchLLM Operator | 0 of 19 others, exit code 1"
        " | 5 of 20 rows again, 3,000 prompt tokens in all, exit code 0,"
        " 39 of 40 texts; 2 processes went on |",
    ]


def test_answers_are_read_by_the_row_s_own_id(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    answer = {"body": {"choices": [{"message": {"content": "yes"}}]}}
    lines = [
        {"id": "vllm-1", "custom_id": "00001", "response": answer},
        {"id": "vllm-2", "custom_id": "00002", "response": {"body": None}},
        {"id": "00003", "text": "no"},
    ]
    file = tmp_path / "texts" / "all.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert load("peers.contenders").texts_of(tmp_path) == {"00001": "yes", "00003": "no"}
