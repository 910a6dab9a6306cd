"""The table of GPUs: the built-in one, one's own, and broken ones."""

from pathlib import Path

import pytest

from batchllm_operator.cost import find_gpu, read_gpu_table
from batchllm_operator.errors import SpecError

OWN = """
[mine]
memory_bytes = 1e9
hbm_bytes_per_s = 1e9
bf16_flop_per_s = 1e12
achievable_compute = 1.0
achievable_bandwidth = 0.5
achievable_memory = 0.9
step_overhead_s = 0
usd_per_hour = 0
"""


def test_the_built_in_table() -> None:
    gpus = read_gpu_table()
    assert {"A100", "H100", "H200", "MI300X"} <= set(gpus)
    assert gpus["H100"].flop_per_s == pytest.approx(0.6 * 989e12)
    assert gpus["H100"].bytes_per_s == pytest.approx(0.85 * 3.35e12)


def test_ones_own_table(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN)
    assert find_gpu("mine", path).bytes_per_s == 5e8
    with pytest.raises(SpecError, match=r"no GPU 'H100'; it has mine"):
        find_gpu("H100", path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes = 1e9", "", "memory_bytes"),
        ("memory_bytes = 1e9", "memory_bytes = 1e9\ncolour = 1", "colour"),
        ("memory_bytes = 1e9", "memory_bytes = 0", "mine.memory_bytes: .* greater than 0"),
        ("memory_bytes = 1e9", "memory_bytes = nan", "memory_bytes"),
        ("memory_bytes = 1e9", 'memory_bytes = "1"', "valid"),
        ("memory_bytes = 1e9", "memory_bytes = true", "valid"),
        ("achievable_compute = 1.0", "achievable_compute = 1.5", "less than or equal to 1"),
        ("usd_per_hour = 0", "usd_per_hour = -1", "greater than or equal to 0"),
        ("[mine]", "mine = 3\n[other]", "mine"),
        ("[mine]", "[mine", "not TOML"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises(SpecError, match=said) as caught:
        read_gpu_table(path)
    assert str(path) in str(caught.value)


def test_an_absent_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can't be read"):
        read_gpu_table(tmp_path / "none.toml")
