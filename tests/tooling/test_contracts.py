"""The import rules in pyproject.toml notice when they are broken, and forget no package."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: dict[str, dict[str, Any]] = {
    contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
}
ALLOWED = {
    "batchllm_operator.spec": "batchllm_operator.errors",
    "batchllm_operator.planner": "numba",
    "batchllm_operator.operators": "airflow",
    "batchllm_kernels.api": "torch",
}
ALLOWED |= dict(line.split(" -> ") for line in CONTRACTS["vllm"]["ignore_imports"])
for number, line in enumerate(CONTRACTS["airflow"]["ignore_imports"]):  # of any module there
    ALLOWED.update([line.replace("*", f"module_{number}").split(" -> ")])
BIN = Path(sys.executable).parent


def our_modules() -> set[str]:
    """Every module of ours that a contract names, and those that `ALLOWED` does."""
    named = {*ALLOWED, *ALLOWED.values()}
    for contract in CONTRACTS.values():
        named |= {*contract["source_modules"], *contract["forbidden_modules"]}
    return {module for module in named if module.startswith("batchllm_") and "." in module}


def lint_imports(folder: Path, imports: Iterable[tuple[str, str]]) -> str:
    """What import-linter says of the packages with nothing in them but (importer, imported)."""
    for module in our_modules():
        package = folder.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        lines = [f"import {imported}\n" for importer, imported in imports if importer == module]
        (package / "__init__.py").write_text("".join(lines))
        for parent in package.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    command = [str(BIN / "lint-imports"), "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == int("Broken contracts" in done.stdout), done.stderr
    return done.stdout


def test_allowed_imports_pass(tmp_path: Path) -> None:
    said = lint_imports(tmp_path, ALLOWED.items())
    assert f"{len(CONTRACTS)} kept, 0 broken" in said


def test_forbidden_imports_are_reported(tmp_path: Path) -> None:
    forbidden = [
        ("errors", "batchllm_operator.errors", "batchllm_operator.spec"),
        ("spec", "batchllm_operator.spec", "batchllm_operator.lake"),
        ("planner", "batchllm_operator.planner", "torch"),
        ("planner", "batchllm_operator.planner", "batchllm_operator.lake"),
        ("planner", "batchllm_operator.planner", "batchllm_operator.simulate"),
        ("simulate", "batchllm_operator.simulate", "batchllm_operator.pipeline"),
        ("operators", "batchllm_operator.operators", "pyarrow"),
        ("operators", "batchllm_operator.operators", "batchllm_operator.pipeline"),
        ("airflow", "batchllm_operator.report.page", "airflow"),
        ("airflow", "batchllm_operator.metrics", "airflow"),
        ("pages", "batchllm_operator.metrics", "batchllm_operator.web"),
        ("vllm", "batchllm_operator.engine", "vllm"),
        ("attention", "batchllm_operator.engine", "batchllm_kernels.api"),
        ("kernels", "batchllm_kernels.api", "batchllm_operator.errors"),
    ]
    said = lint_imports(tmp_path, [*ALLOWED.items(), *(each[1:] for each in forbidden)])
    _, _, broken = said.partition("Broken contracts")
    for contract, importer, imported in forbidden:
        name = CONTRACTS[contract]["name"]
        assert f"{name} BROKEN" in said
        chains = broken.partition(f"{name}\n---")[2].partition("\n---")[0]
        assert f"{importer} -> {imported} (" in chains


@pytest.mark.parametrize(
    ("contract", "allowed"),
    [
        ("errors", {"errors"}),
        ("spec", {"spec", "errors"}),
        ("planner", {"planner", "spec", "errors"}),
        ("operators", {"operators", "spec", "errors"}),
        ("simulate", {"simulate", "spec", "errors", "planner", "progress", "vllm_plugin"}),
    ],
)
def test_contract_names_every_sibling(contract: str, allowed: set[str]) -> None:
    forbidden = _siblings_in(CONTRACTS[contract]["forbidden_modules"])
    assert our_siblings() - allowed <= forbidden


def test_nobody_but_the_plugins_may_import_kernels() -> None:
    assert _siblings_in(CONTRACTS["attention"]["source_modules"]) == our_siblings() - {
        "vllm_plugin"
    }


def our_siblings() -> set[str]:
    """Packages and modules of batchllm_operator."""
    package = ROOT / "batchllm_operator"
    siblings = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    siblings |= {path.parent.name for path in package.glob("*/__init__.py")}
    return siblings


def _siblings_in(modules: list[str]) -> set[str]:
    return {module.removeprefix("batchllm_operator.") for module in modules}


@pytest.mark.parametrize(
    ("path", "is_banned"),
    [
        ("batchllm_operator/lake/parquet/table.py", True),
        ("batchllm_operator/operators/generate.py", True),
        ("dags/daily_snippets.py", True),
        ("batchllm_operator/engine/vllm_engine.py", False),
        ("kernels/batchllm_kernels/api.py", False),
    ],
)
def test_heavy_module_level_imports_are_banned(path: str, is_banned: bool) -> None:
    source = "import torch\n\n\ndef load() -> None:\n    import vllm\n"
    command = [str(BIN / "ruff"), "check", "--select", "TID253", "--output-format", "concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", path, "-"],
        cwd=ROOT, input=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.count("TID253") == int(is_banned), done.stdout
