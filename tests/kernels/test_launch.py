"""Launches after the first: the same kernel and arguments, without Triton's binder.

In a process that compiles, on a driver that launches nothing.
"""

import json
from pathlib import Path

from support.compiler import ROOT, run_script

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import torch, triton
from torch import Tensor
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from benchmarks.launch_overhead import IdleDriver, Layer

compiled = []  # with a hook, as vLLM sets one, Triton writes a kernel's constants as JSON
triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
driver = IdleDriver()
triton.runtime.driver.set_active(driver)
layer, bound = Layer.make(), []
run = prefix_attention_kernel.run
def counted(*args, **options):
    bound.append(1)
    return run(*args, **options)
prefix_attention_kernel.run = counted

def seen():
    grid, arguments = driver.launched
    driver.launched = ()
    plain = [each.data_ptr() if isinstance(each, Tensor) else str(each) for each in arguments]
    return grid, len(bound), plain

def launches(layer, *many):
    found = []
    for settings in many:
        layer.attend(**settings)
        found.append(seen())
    return found

odd = torch.zeros(layer.q.numel() + 1, dtype=layer.q.dtype)[1:].view_as(layer.q)
print(json.dumps({
    "plain": launches(layer, {}, {}, {"scale": 0.5}),
    "window": launches(layer, {"window": 64}, {"window": 64}, {}),
    "unaligned": launches(replace(layer, q=odd), {}, {}),
    "short": launches(replace(layer, q=layer.q[:8], out=layer.out[:8]), {}),
}))
assert any("prefix_attention_kernel" in name for name in compiled), compiled
for wrong in (replace(layer, k_cache=layer.k_cache.float()), replace(layer, out=layer.out[:9])):
    try:
        wrong.attend()
    except ValueError as error:
        print(error)
"""


def test_a_known_launch_is_the_same_without_the_binder(tmp_path: Path) -> None:
    done = run_script(SCRIPT, str(ROOT), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    found, *refused = done.stdout.splitlines()
    (first, second, scaled), (window, again, without), unaligned, (short,) = json.loads(
        found
    ).values()
    grid, bound, arguments = first
    assert grid == [2, 1, 1]  # the programs of one processor
    assert len(arguments) == 23  # all of the kernel's, the constant too
    assert second == first
    assert [one != other for one, other in zip(scaled[2], arguments, strict=True)].count(True) == 1
    assert scaled[1] == bound

    # Another variant is bound once; the first one is still known.
    assert window[1] == again[1] == bound + 1
    assert window[2] == again[2] != arguments
    assert without == [grid, bound + 1, arguments]

    # Triton compiles apart for odd addresses: that is left to its binder, each time.
    assert [each[1] for each in unaligned] == [bound + 2, bound + 3]
    assert unaligned[0][2] == unaligned[1][2] != arguments

    assert short == [grid, bound + 3, arguments]  # fewer tokens are no other launch
    assert "k_cache is torch.float32" in refused[0]
    assert "out is [9," in refused[1]
