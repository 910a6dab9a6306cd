"""What the host spends on launching one layer of prefix attention; needs no GPU.

    python -m benchmarks.launch_overhead

Compiles the shipped kernel for sm90 and launches it on a driver that does nothing: checked and
bound by Triton each time, as in a first step, and as in those that follow. The real driver's
launch, some microseconds in C, isn't counted in either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from batchllm_kernels.prefix_attention import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    StepPlan,
    StepPlanner,
    load_config,
    prefix_attention,
)
from benchmarks.provenance import print_last_line

SHAPE: Final = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
ROUNDS: Final = 5
LAUNCHES: Final = 2000
"""In a round."""


class IdleDriver(DriverBase):  # type: ignore[misc]
    """A driver of a chip that isn't there: it loads and launches nothing.

    `launched` has (grid, arguments) of the last launch.
    """

    def __init__(self) -> None:
        self.utils = self
        self.launched: tuple[tuple[int, ...], tuple[object, ...]] = ((), ())
        self.launcher_cls = self._launcher

    def _launcher(self, *_: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, x: int, y: int, z: int, *rest: object) -> None:
        self.launched = ((x, y, z), rest[6:])  # after the stream, the function and its metadata

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, most threads)."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}  # room for anything

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the benchmark's tensors are."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError  # nothing here is tuned

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError  # launchers in C would ask

    @classmethod
    def is_active(cls) -> bool:
        return False  # only by `triton.runtime.driver.set_active`


@dataclass(frozen=True)
class Layer:
    """One layer of a step of 256 tokens, to be launched again and again."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: StepPlan
    out: Tensor

    @classmethod
    def make(cls) -> Layer:
        """Sizes of Mistral 7B, with settings of sm90."""
        q = torch.zeros(256, SHAPE.num_q_heads, SHAPE.head_dim, dtype=torch.float16)
        cache = q.new_zeros(8, 2, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        planner = StepPlanner(
            SHAPE, BatchLimits(256, 256), impl="triton", device=q.device, config=load_config("sm90")
        )
        ints = torch.zeros(2, dtype=torch.int32)
        plan = planner.plan(PagedBatch(ints, ints[:1], ints[:1, None]))
        return cls(q, cache[:, 0], cache[:, 1], plan, torch.empty_like(q))

    def attend(self, **settings: Any) -> None:
        """As a model's layer does."""
        settings = {"scale": 0.1, "out": self.out, **settings}
        prefix_attention(self.q, self.k_cache, self.v_cache, self.plan, **settings)

    def attend_as_at_first(self) -> None:
        """Checked and bound by Triton."""
        assert self.plan.launches is not None
        self.plan.launches._known.clear()
        self.attend()


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call, the least of some rounds."""
    call()
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(LAUNCHES):
            call()
        times.append((time.process_time() - begun) / LAUNCHES)
    return min(times) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    triton.runtime.driver.set_active(IdleDriver())
    layer = Layer.make()
    first, then = microseconds(layer.attend_as_at_first), microseconds(layer.attend)
    print(f"us a layer (CPU): {first:.1f} at first, {then:.1f} from then on")
    print_last_line({"benchmark": "launch_overhead", "first_us": first, "then_us": then})


if __name__ == "__main__":
    main()
