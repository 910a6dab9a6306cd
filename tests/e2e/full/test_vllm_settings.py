"""What a user reads when vLLM refuses a spec, in a process of its own."""

import os
import subprocess
import sys

from support.demo_job import DS, OFFLINE, Demo


def test_a_command_that_vllm_refuses_ends_in_one_line(demo: Demo) -> None:
    """As users have it: a process, with all that vLLM prints while it is imported."""
    spec = demo.write_spec("refused", engine={"extra_args": {"kv_cache_dtype": "nonsense"}})
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    run = ["run", "--plan", plan["plan_uri"], "--worker", "0", "--num-workers", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", "batchllm_operator", *run],
        env={**os.environ, **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout
    [line] = [line for line in ended.stdout.splitlines() if "batchllm: error: " in line]
    assert "cache_dtype" in line
