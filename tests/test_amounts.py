"""Amounts in words."""

import pytest

from batchllm_operator.amounts import byte_size, counted


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert counted(1, "prefix", "prefixes") == "1 prefix"
    assert counted(1_234, "prefix", "prefixes") == "1,234 prefixes"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (999.6, "1 kB"),
        (748e6, "748 MB"),
        (999_600_000, "1 GB"),
        (1.2345e12, "1.23 TB"),
    ],
)
def test_a_size_has_the_unit_that_fits_it(num_bytes: float, text: str) -> None:
    assert byte_size(num_bytes) == text
