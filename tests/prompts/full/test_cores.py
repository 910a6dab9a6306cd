"""Token ids are made on the cores that a process may use, whatever limits it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tokenizer_families import FAMILIES

COUNT_THREADS = """
import os, sys
from pathlib import Path
from tokenizers import Tokenizer
from batchllm_operator.prompts.prompt_encoder import PromptEncoder
backend = Tokenizer.from_file(sys.argv[1])
def reference(texts):
    return [backend.encode(text).ids for text in texts]
encoder = PromptEncoder(reference, backend, "t", add_special_tokens=True)
encoder.encode(["the quick brown fox " * 100] * 1000)
assert encoder.library == "fastokens"
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(1 + sum(name.startswith("fastokens") for name in names))  # the caller works, too
"""
# cgroups as a container has them: version 2, and the controller of version 1.
FILES = {
    "v2": {"cgroup.controllers": "cpu", "cpu.max": "{quota} 100000", "/proc": "0::/"},
    "v1": {
        "cpu/cpu.cfs_quota_us": "{quota}",
        "cpu/cpu.cfs_period_us": "100000",
        "/proc": "1:cpu:/",
    },
}
NUM_CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    FAMILIES["qwen2"]().save(str(path))
    return path


def count_threads(tokenizer: Path, *before: str) -> int:
    command = [*before, sys.executable, "-P", "-c", COUNT_THREADS, str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("num_cores", sorted({1, NUM_CORES}))
def test_it_keeps_to_its_affinity(tokenizer: Path, num_cores: int) -> None:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_cores]))
    assert count_threads(tokenizer, "taskset", "--cpu-list", cores) == num_cores


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_it_keeps_to_its_containers_quota(
    tokenizer: Path, tmp_path: Path, version: str, num_cores: int
) -> None:
    """The files that say so, laid over those of this machine in a namespace of its own."""
    if num_cores > NUM_CORES:
        pytest.skip(f"it takes {num_cores} cores")
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--mount", "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("it takes a mount namespace")
    for name, content in FILES[version].items():
        path = tmp_path / ("own" if name == "/proc" else f"cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format(quota=100_000 * num_cores) + "\n")
    mount = (
        f"mount --bind {tmp_path}/cgroup /sys/fs/cgroup"
        f' && mount --bind {tmp_path}/own /proc/$$/cgroup && exec "$@"'
    )
    before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    assert count_threads(tokenizer, *before) == num_cores
