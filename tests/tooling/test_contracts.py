"""The import rules in pyproject.toml notice when they are broken, and forget no package."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: dict[str, dict[str, Any]] = {
    contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
}
LAYERS = [layer.split(" | ") for layer in CONTRACTS["layers"]["layers"]]
IGNORED = [line for each in CONTRACTS.values() for line in each.get("ignore_imports", ())]
ALLOWED = [
    *((f"batchllm_operator.{a[0]}", f"batchllm_operator.{b[0]}") for a, b in pairwise(LAYERS)),
    ("batchllm_operator.prefixes", "numba"),
    ("batchllm_kernels.api", "torch"),
    # What a contract ignores must be there, of any module.
    *(line.replace("**", f"module_{number}").split(" -> ") for number, line in enumerate(IGNORED)),
]
BIN = Path(sys.executable).parent


def lint_imports(folder: Path, imports: Iterable[Sequence[str]]) -> str:
    """What import-linter says of all rooms with nothing in them but (importer, imported)."""
    imports = [*imports]
    named = {name for pair in imports for name in pair}
    named |= {name.rpartition(".")[0] for name in named if name.count(".") > 2}
    named |= {f"batchllm_operator.{room}" for layer in LAYERS for room in layer}
    for contract in CONTRACTS.values():
        named |= {*contract.get("source_modules", ()), *contract.get("forbidden_modules", ())}
    for module in sorted(name for name in named if name.startswith("batchllm_")):
        package = folder.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        lines = [f"import {imported}\n" for importer, imported in imports if importer == module]
        (package / "__init__.py").write_text("".join(lines))
    command = [str(BIN / "lint-imports"), "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == int("Broken contracts" in done.stdout), done.stderr
    return done.stdout


def test_allowed_imports_pass(tmp_path: Path) -> None:
    assert f"{len(CONTRACTS)} kept, 0 broken" in lint_imports(tmp_path, ALLOWED)


def test_forbidden_imports_are_reported(tmp_path: Path) -> None:
    forbidden = [
        ("layers", "batchllm_operator.errors", "batchllm_operator.spec"),
        ("layers", "batchllm_operator.spec", "batchllm_operator.lake"),
        ("layers", "batchllm_operator.prefixes", "batchllm_operator.lake"),
        ("layers", "batchllm_operator.simulate", "batchllm_operator.shards"),
        ("layers", "batchllm_operator.run", "batchllm_operator.plan"),
        ("layers", "batchllm_operator.shards", "batchllm_operator.commit"),
        ("layers", "batchllm_operator.metrics", "batchllm_operator.web"),
        ("prefixes", "batchllm_operator.prefixes", "torch"),
        ("prefixes", "batchllm_operator.prefixes", "batchllm_operator.spec"),
        ("operators", "batchllm_operator.operators", "pyarrow"),
        ("operators", "batchllm_operator.operators", "batchllm_operator.shards"),
        ("airflow", "batchllm_operator.report", "airflow"),
        ("airflow", "batchllm_operator.metrics", "sqlalchemy"),
        ("vllm", "batchllm_operator.engine", "vllm"),
        ("attention", "batchllm_operator.engine", "batchllm_kernels.api"),
        ("kernels", "batchllm_kernels.api", "batchllm_operator.errors"),
        ("formats", "batchllm_operator.plan", "deltalake"),
    ]
    without_a_layer = ("batchllm_operator.attic", "numba")
    pairs = [pair for _, *pair in forbidden]
    report = lint_imports(tmp_path, [*ALLOWED, *pairs, without_a_layer])
    _, _, broken = report.partition("Broken contracts")
    assert "attic" in broken
    for contract, importer, imported in forbidden:
        name = CONTRACTS[contract]["name"]
        assert f"{name} BROKEN" in report
        chains = broken.partition(f"{name}\n---")[2].partition("\n---")[0]
        assert f"{importer} -> {imported} (" in chains


@pytest.mark.parametrize(
    ("path", "is_banned"),
    [
        ("batchllm_operator/lake/parquet/table.py", True),
        ("batchllm_operator/operators/stages.py", True),
        ("dags/daily_snippets.py", True),
        ("batchllm_operator/engine/vllm/engine.py", False),
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
