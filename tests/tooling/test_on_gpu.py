"""`on_gpu.sh` with a made-up interpreter: its archive, what a next call takes up, its limits."""

import json
import os
import re
import signal
import subprocess
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.benchmark_modules import ROOT, load
from support.demo_job import wait_until

PYTHON = """#!/usr/bin/env bash
# Notes how it is called, makes what a step makes, and fails or hangs where the test wants it.
case "$*" in *code_digest*) cat "$FAKE/code" && exit 0 ;; esac
printf '%s\\n' "$*" | tr '\\n' ' ' >>"$FAKE/calls"
echo >>"$FAKE/calls"
env >"$FAKE/env"
case "$*" in *compileall*) exit 0 ;; esac
mkdir -p "$VLLM_CACHE_ROOT" "$TRITON_CACHE_DIR" "$NUMBA_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
touch "$VLLM_CACHE_ROOT/compiled"
while (($#)); do
  case "$1" in
    -m) module=$2 ;;
    --out) case $2 in
      *.json) echo '{}' >"$2" ;;
      *) mkdir -p "$2" && echo '{"row": 1}' >>"$2/rows.jsonl" ;;
    esac ;;
    --json) echo '{}' >"$2" ;;
  esac
  shift
done
[[ ${module:-} != "$(cat "$FAKE/hangs")" ]] || { echo $$ >"$FAKE/pid" && exec sleep 60; }
[[ ${module:-} != "$(cat "$FAKE/fails")" ]] || exit 5
"""
KERNEL = "benchmarks.kernel"
END_TO_END, AGREEMENT = "benchmarks.end_to_end", "benchmarks.end_to_end.agreement"


class Machine:
    """A machine on which nothing lies but what it is given; calls run in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._python = folder / "python"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)
        for name, text in (("code", "c0de"), ("hangs", "nothing"), ("fails", "nothing")):
            (folder / name).write_text(text)
        (folder / "calls").touch()
        (folder / "tmp").mkdir()
        self.archive = folder / "out" / "on_gpu.tar.gz"

    def start(self, *site: str, **settings: str) -> subprocess.Popen[str]:
        """A call."""
        own = {"FAKE": str(self.folder), "PYTHON": str(self._python)}
        own |= {"TMPDIR": str(self.folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        script = str(ROOT / "benchmarks" / "on_gpu.sh")
        return subprocess.Popen(
            # What a shell starts in the background ignores SIGINT, and so do its children.
            ["env", "--default-signal=INT", script, str(self.folder / "out"), *site],
            env={"PATH": os.environ["PATH"]} | own | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *site: str, **settings: str) -> tuple[int, str]:
        """Exit code, and what a call printed."""
        call = self.start(*site, **settings)
        printed, _ = call.communicate(timeout=60)
        return call.returncode, printed

    def calls(self) -> list[str]:
        """Arguments of the interpreter, call by call; none is remembered."""
        found = (self.folder / "calls").read_text().splitlines()
        (self.folder / "calls").write_text("")
        return found

    def modules(self) -> list[str]:
        """The modules that ran, in order."""
        return [found[1] for each in self.calls() if (found := re.search(r"-m (\S+)", each))]

    def results(self) -> dict[str, str]:
        """The archive's files."""
        with tarfile.open(self.archive) as archive:
            files = [member for member in archive.getmembers() if member.isfile()]
            return {
                member.name.removeprefix("./"): found.read().decode()
                for member in files
                if (found := archive.extractfile(member))
            }

    def steps(self) -> dict[str, dict[str, Any]]:
        """The lines of `steps.jsonl` by their steps, the last one of each."""
        lines = map(json.loads, self.results()["steps.jsonl"].splitlines())
        return {line["step"]: line for line in lines}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def test_a_call_ends_with_one_archive_of_results_without_caches(machine: Machine) -> None:
    code, printed = machine.call(STEPS="imports quick end_to_end")
    assert code == 0, printed
    assert [path.name for path in machine.archive.parent.iterdir()] == ["on_gpu.tar.gz"]
    assert set(machine.results()) == {
        "steps.jsonl",
        *("imports.log", "quick.log", "end_to_end.log"),
        *("quick.json", "end_to_end.json", "end_to_end/rows.jsonl"),
    }
    [cache] = (machine.folder / "tmp").iterdir()  # nothing else is left
    assert {path.name for path in cache.iterdir()} == {"vllm", "triton", "numba", "inductor"}
    environment = (machine.folder / "env").read_text().splitlines()
    assert "VLLM_HOST_IP=127.0.0.1" in environment
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE") for line in environment)


@pytest.mark.parametrize(
    ("number", "steps", "least_s"),
    [
        ("1", "imports quick tune case_1", 240),
        ("2", "case_1_variants agreement degree_16", 125),
        ("", "imports quick agreement end_to_end kernel tune", None),
    ],
)
def test_a_call_has_its_steps_whose_limits_fit_into_ten_minutes(
    machine: Machine, number: str, steps: str, least_s: int | None
) -> None:
    """The last step gets what is left of 530 s, less 15 s for the end."""
    code, printed = machine.call(CALL=number)
    assert code == 0, printed
    lines = machine.steps()
    assert list(lines) == steps.split()
    *limits, last = (line["limit_s"] for line in lines.values())
    assert 500 < last <= 530 - 15
    assert least_s is None or 530 - 15 - sum(limits) >= least_s


def test_modules_have_the_options_that_steps_give_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = "quick kernel tune case_1 case_1_variants degree_16 end_to_end agreement"
    code, printed = machine.call(STEPS=f"{steps} profile_stock profile_ours")
    assert code == 0, printed
    calls = [call.split()[2:] for call in machine.calls()]  # without -P -m
    assert len(calls) == 10
    load("provenance")  # finds the package
    for module, *options in calls:
        monkeypatch.setattr("sys.argv", [module, *options, "--unknown"])
        name = module if module != END_TO_END else f"{module}.__main__"
        with pytest.raises(SystemExit):
            import_module(name).main()
        assert capsys.readouterr().err.endswith("error: unrecognized arguments: --unknown\n")


def test_a_bare_machine_goes_on_with_the_archive_of_the_last(
    machine: Machine, tmp_path: Path
) -> None:
    (machine.folder / "fails").write_text(END_TO_END)
    steps = "imports quick end_to_end"
    code, printed = machine.call(STEPS=steps)
    assert code == 1, printed
    assert machine.steps()["end_to_end"]["rc"] == 5
    other = Machine(tmp_path / "other")
    code, printed = other.call(STEPS=steps, FROM=str(machine.archive))
    assert code == 0, printed
    assert printed.count("done before") == 2
    assert other.modules() == [END_TO_END]
    assert other.results()["end_to_end/rows.jsonl"].count("row") == 2
    assert other.results()["quick.json"] == machine.results()["quick.json"]
    # In the same folder it is found without a word; other arguments are another measurement.
    assert other.call(STEPS=steps)[0] == 0
    assert other.modules() == []
    assert other.call(STEPS=steps, MODEL="tiny")[0] == 0
    assert other.modules() == [END_TO_END]
    (other.folder / "code").write_text("0ther")
    assert other.call(STEPS=steps)[0] == 0
    assert other.modules() == [KERNEL, END_TO_END]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_call_that_is_stopped_brings_home_what_it_has(
    machine: Machine, tmp_path: Path, number: signal.Signals
) -> None:
    (machine.folder / "hangs").write_text(END_TO_END)
    call = machine.start(STEPS="imports quick end_to_end agreement")
    pid = machine.folder / "pid"
    wait_until(pid.exists, "the step hangs", limit_s=30.0)
    call.send_signal(number)
    printed, _ = call.communicate(timeout=30)
    assert call.returncode == 128 + number, printed
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert set(machine.steps()) == {"imports", "quick"}
    assert "row" in machine.results()["end_to_end/rows.jsonl"]
    other = Machine(tmp_path / "other")
    code, printed = other.call(
        STEPS="imports quick end_to_end agreement", FROM=str(machine.archive)
    )
    assert code == 0, printed
    assert other.modules() == [END_TO_END, AGREEMENT]


def test_a_step_that_runs_past_its_limit_is_ended_and_none_begins_without_time(
    machine: Machine,
) -> None:
    code, printed = machine.call(TOTAL_S="40")
    assert code == 1 and printed.count("no time is left") == 6, printed
    assert machine.calls() == []
    assert machine.results() == {"steps.jsonl": ""}
    (machine.folder / "hangs").write_text(KERNEL)
    code, printed = machine.call(STEPS="quick imports", QUICK_S="3", LEAST_S="1")
    assert code == 1, printed
    assert [line["rc"] for line in machine.steps().values()] == [124, 0], "the next one runs"


def test_settings_of_the_kernel_are_code_and_results_are_not(tmp_path: Path) -> None:
    code_digest = load("provenance").code_digest
    folder = tmp_path / "kernels" / "batchllm_kernels"
    results = tmp_path / "benchmarks" / "results"
    for path in (folder, results):
        path.mkdir(parents=True)
    digests = [code_digest(tmp_path)]
    for path in (folder / "launch.py", folder / "sm90.json", tmp_path / "benchmarks/paper.toml"):
        for text in ("{}", "{1}"):
            path.write_text(text)
            digests.append(code_digest(tmp_path))
    assert len(set(digests)) == 7
    (results / "kernel_h200.json").write_text("{}")
    assert code_digest(tmp_path) == digests[-1]
    assert code_digest() == code_digest(ROOT)
