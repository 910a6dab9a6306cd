"""The paper's workloads (Sec. 6.1, 6.2) with made-up tokens, and some beside them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from batchllm_operator.simulate.workload import Shape


def micro(prefix: int, distinct: int, degree: int) -> Shape:
    """One of the paper's microbenchmarks; lengths in tokens."""
    name = f"micro_{prefix}_{distinct}_degree_{degree}"
    return Shape(name, 1600, degree, prefix, distinct, output_tokens=100)


def case_1(name: str, output_tokens: int = 100) -> Shape:
    """The paper's case 1, under a short instruction."""
    return Shape(name, 3000, 7, 1100, 400, output_tokens, 30)


WORKLOADS: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        case_1("case_1"),
        Shape("case_2", 1000, 11.36, 770, 978, 32),
        *(
            micro(prefix, distinct, degree)
            for prefix, distinct in ((2000, 200), (1000, 1000), (200, 2000))
            for degree in (4, 16)
        ),
        Shape("no_sharing", 1500, 1, 0, 1530, 100),
        case_1("case_1_output_400", 400),
    )
}


def longest_tokens(shape: Shape) -> int:
    """Most tokens that a prompt and its output may have together."""
    parts = (
        round(mean * (1 + shape.spread)) for mean in (shape.prefix_tokens, shape.distinct_tokens)
    )
    return shape.instruction_tokens + sum(parts) + shape.output_tokens


def least_prefill_tokens(shape: Shape) -> int:
    """Prompt tokens on average, with each document computed once."""
    num_documents = -(-shape.num_requests // shape.share_degree)
    shared = shape.instruction_tokens + shape.prefix_tokens
    return round(num_documents * shared + shape.num_requests * shape.distinct_tokens)


def scaled(shape: Shape, share: float) -> Shape:
    """The same lengths and degree with a share of the requests, whole groups."""
    groups = max(1, round(shape.num_requests * share / shape.share_degree))
    return replace(shape, num_requests=round(groups * shape.share_degree))


def shrunk(shape: Shape) -> Shape:
    """A few requests with a sixteenth of the tokens: for tests and rehearsals on a CPU."""
    return replace(
        scaled(shape, 1 / 60),
        prefix_tokens=shape.prefix_tokens // 16,
        distinct_tokens=shape.distinct_tokens // 16,
        instruction_tokens=shape.instruction_tokens // 16,
        output_tokens=max(2, shape.output_tokens // 16),
    )
