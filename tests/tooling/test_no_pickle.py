"""Nothing of ours reads or runs data as code: no pickle, no eval, no shell.

ruff finds these in the source (`tool.ruff.lint` in pyproject.toml); here is what only a run shows.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import joblib", "import marshal"),
        *("import multiprocessing", "from concurrent.futures import ProcessPoolExecutor"),
        *("import torch\n\ntorch.load(f, weights_only=False)", "eval('1')", "exec(x)"),
        *("import os\n\nos.system('x')", "import subprocess\n\nsubprocess.run('x', shell=True)"),
        *("import yaml\n\nyaml.load(t)", "import yaml\n\nyaml.load(t, yaml.UnsafeLoader)"),
    ],
)
def test_ruff_refuses_data_that_is_read_as_code(code: str) -> None:
    ruff = [str(Path(sys.executable).parent / "ruff"), "check", "--output-format", "concise"]
    done = subprocess.run(
        [*ruff, "--stdin-filename", "batchllm_operator/lake/table.py", "-"],
        cwd=ROOT, input=f"{code}\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(r": (S\d+|TID251) ", done.stdout), done.stdout + done.stderr


def test_vllms_pickles_stay_off() -> None:
    """vLLM takes pickles between its processes only if this is set; nothing of ours sets it."""
    name = "VLLM_ALLOW_INSECURE" + "_SERIALIZATION"
    kinds = ("*.py", "*.yaml", "*.toml", "*.sh", "Dockerfile*", "Makefile", "*.tpl")
    command = ["git", "grep", "--no-index", "--exclude-standard", "-l", name, "--", *kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")  # 1: no line matches


STAGES = """
import sys

found = set()


def watch(event, arguments):
    if event in ("pickle.find_class", "marshal.loads", "shelve.open", "os.system"):
        frame = sys._getframe(1)
        found.add((event, frame.f_globals.get("__name__", "?").partition(".")[0]))


sys.addaudithook(watch)
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.fake_job import DS, document_rows, fake_spec, write_table
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker

lake = Path({lake!r})
write_table(lake / "documents", document_rows(2, 2))
plan = plan_job(fake_spec(lake, reuse_outputs=True), DS)
run_worker(plan)
assert commit_run(plan.folder.uri).num_rows_out == 4
import pickle
pickle.loads(pickle.dumps(Path))  # or the hook would see nothing
print(sorted(event for event in found if event[0] != "marshal.loads"))
"""


def test_a_job_unpickles_nothing_but_its_own_compiled_code(tmp_path: Path) -> None:
    """numba keeps the planner's compiled loops as pickles, beside the modules that they are of: who
    can write there can change the modules, too."""
    script = STAGES.format(tests=str(ROOT / "tests"), lake=str(tmp_path / "lake"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert ("pickle.find_class", "__main__") in events
    assert events <= {("pickle.find_class", "__main__"), ("pickle.find_class", "numba")}
