"""The estimate against the simulation, for other shapes and for the stock scheduler."""

import pytest
from simulate.test_vllm_scheduling import FIFTH, OURS, STOCK, Shape, check_estimate


@pytest.mark.parametrize(
    ("name", "shape", "num_blocks"),
    [
        (OURS, Shape("case 1, long outputs", 300, 7, 1100, 400, 400, 30), FIFTH // 2),
        (STOCK, Shape("nothing shared", 300, 1, 0, 1530, 100), FIFTH),
        (STOCK, Shape("small cache", 600, 7, 1100, 400, 100, 30), FIFTH // 4),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_the_estimate_is_within_a_tenth_of_the_simulation(
    name: str, shape: Shape, num_blocks: int
) -> None:
    check_estimate(name, shape, num_blocks)
