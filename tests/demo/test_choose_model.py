"""`choose_model` of scripts/demo_env.sh: the demo's specs, for the model that a user asks for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_table import demo_documents

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"""\
#!/bin/sh
case "$*" in
*real_models.py*) echo "models: no package" >&2; exit "$REAL_MODELS" ;;
*demo_model.py*) mkdir -p "$2"; touch "$2/config.json" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose environment makes no models."""
    for name in ("dags", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name, text in {"python": PYTHON, "airflow": "#!/bin/sh\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def choose(root: Path, model: str, real_models: int) -> tuple[int, list[str], dict[str, Any]]:
    """Its status, the lines of its log, and the spec of the ranking that the demo would run."""
    script = 'source scripts/demo_env.sh; choose_model "$1"; cat "$specs/offline_ranking.yaml"'
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", model],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "root": str(root), "BATCHLLM_VENV": str(root)}
        | {"REAL_MODELS": str(real_models)},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stderr.splitlines(), yaml.safe_load(ended.stdout) or {}


def test_smollm2_takes_the_specs_as_they_are(root: Path) -> None:
    status, _, spec = choose(root, "smollm2", 0)
    assert (status, spec["model"]["path"]) == (0, "../../.models/smollm2")
    assert not (root / ".demo").exists()


def test_without_the_package_a_line_says_that_the_model_is_a_random_one(root: Path) -> None:
    status, log, spec = choose(root, "smollm2", 5)
    assert status == 0 and len(log) == 2 and "random weights" in log[1]
    assert spec["model"]["path"] == str(root / ".demo" / "tiny")
    assert "dtype" not in spec["engine"]


def test_another_failure_of_the_package_ends_the_demo(root: Path) -> None:
    assert choose(root, "smollm2", 1)[0] == 1


def test_labels_of_the_random_model_are_tokens_of_its_tokenizer(root: Path) -> None:
    from demo_model import _train_tokenizer

    tokenizer = _train_tokenizer([document.text for document in demo_documents()])
    labels = choose(root, "tiny", 0)[2]["labels"]
    assert labels.keys() == {"relevant", "irrelevant"}
    assert [len(tokenizer.encode(label)) for label in labels.values()] == [1, 1]


def test_a_folder_is_named_with_its_whole_path(root: Path) -> None:
    (root / "mine").mkdir()
    spec = choose(root, "mine", 0)[2]
    assert spec["model"]["path"] == str(root / "mine")
    assert spec["labels"] == {"relevant": " Yes", "irrelevant": " No"}
