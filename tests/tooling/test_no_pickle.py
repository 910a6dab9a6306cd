"""Nothing of ours reads or runs data as code: no pickle, no eval, no shell."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["batchllm_operator", "kernels/batchllm_kernels", "plugins", "dags", "scripts", "docker"]
FOLDERS += ["benchmarks", "helm"]
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MODULES |= {"pickletools", "jsonpickle", "copyreg", "pickle5", "dbm"}
CALLS = {"eval", "exec", "os.system", "os.popen", "commands.getoutput", "yaml.unsafe_load"}
CALLS |= {"yaml.full_load", "subprocess.getoutput", "subprocess.getstatusoutput"}
CALLS |= {"create_subprocess_shell", "asyncio.create_subprocess_shell", "runpy.run_path"}
CALLS |= {"builtins.eval", "builtins.exec", "pd.read_pickle", "pandas.read_pickle", "input"}
SAFE_YAML = {"SafeLoader", "CSafeLoader", "_SpecLoader", "_UniqueKeyLoader"}
ALLOWED = {
    # torch's own version.py, of the release that is pinned by its checksum.
    ("scripts/environment.py", "exec"),
}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call) -> dict[str, str]:
    return {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg}


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each thing that treats data as code."""
    names: list[str]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            name, given = _dotted(node.func), _keywords(node)
            if name in CALLS or "pickle" in name.lower():
                yield node.lineno, name
            if name in ("torch.load",) and given.get("weights_only") != "True":
                yield node.lineno, name
            if given.get("allow_pickle", "False") != "False":
                yield node.lineno, f"{name}(allow_pickle)"
            if given.get("shell", "False") != "False":
                yield node.lineno, f"{name}(shell)"
            if name in ("yaml.load", "yaml.load_all"):
                loader = [ast.unparse(each) for each in node.args[1:2]] or [given.get("Loader", "")]
                if loader[0].rpartition(".")[2] not in SAFE_YAML:
                    yield node.lineno, f"{name}({loader[0]})"
        if isinstance(node, ast.ClassDef) and node.name in SAFE_YAML:
            bases = {_dotted(base) for base in node.bases}
            if not bases <= {"yaml.SafeLoader", "yaml.CSafeLoader"}:
                yield node.lineno, node.name


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 150
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_data_is_read_or_run_as_code(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for line, what in faults(ast.parse(path.read_text(encoding="utf-8"))):
            if (name, what) not in ALLOWED:
                found.append(f"{name}:{line}: {what}")
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import joblib.memory", "import a, marshal"),
        *("eval('1')", "exec(x)", "os.system('x')", "torch.load(f)", "pd.read_pickle(f)"),
        *("torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "yaml.load(t)"),
        *("subprocess.run('x', shell=True)", "yaml.load(t, Loader=yaml.Loader)", "f(shell=on)"),
        *("yaml.load(t, yaml.UnsafeLoader)", "class _SpecLoader(yaml.Loader): pass"),
    ],
)
def test_the_search_finds(code: str) -> None:
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        *("yaml.load(t, yaml.SafeLoader)", "yaml.safe_load(t)", "torch.load(f, weights_only=True)"),
        *(
            "model.eval()",
            "np.load(f)",
            "subprocess.run(['x'])",
            "asyncio.create_subprocess_exec(x)",
        ),
    ],
)
def test_the_search_leaves_alone(code: str) -> None:
    assert not list(faults(ast.parse(code)))


USERS_OF_PROCESSES = {
    # Spawned workers of a developer's command: numbers and code of ours, from parent to child.
    "kernels/batchllm_kernels/compile.py",
    "kernels/batchllm_kernels/tuning/candidates.py",
    "benchmarks/plan_stage.py",
    "benchmarks/planner.py",
    "benchmarks/runahead/__main__.py",  # settings so; what is said afterwards is JSON
    "benchmarks/faults/__main__.py",
    "benchmarks/faults/zygote.py",
    "benchmarks/runahead/replica.py",
    "benchmarks/scheduler.py",
}


def test_only_tools_for_developers_start_processes_that_pickle() -> None:
    """`multiprocessing` hands arguments and results over as pickles, through pipes of its own."""
    found = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(
                n.split(".")[0] == "multiprocessing" or n == "concurrent.futures" for n in names
            ):
                text = path.read_text(encoding="utf-8")
                if "multiprocessing" in text or "ProcessPoolExecutor" in text:
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == USERS_OF_PROCESSES


def test_vllms_pickles_stay_off() -> None:
    """vLLM takes pickles between its processes only if this is set; nothing of ours sets it."""
    name = "VLLM_ALLOW_INSECURE" + "_SERIALIZATION"
    kinds = ("*.py", "*.yaml", "*.toml", "*.sh", "Dockerfile*", "Makefile", "*.tpl")
    folders = [each for each in ROOT.iterdir() if each.is_dir()]
    folders = [each for each in folders if each.name != ".git" and ".venv" not in each.name]
    texts = [path for kind in kinds for each in folders for path in each.rglob(kind)]
    texts += [path for kind in kinds for path in ROOT.glob(kind)]
    assert [path for path in texts if name in path.read_text(encoding="utf-8")] == []


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
print(sorted(each for each in found if each[0] != "marshal.loads"))
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
