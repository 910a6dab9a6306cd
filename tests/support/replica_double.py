"""Run as a module: stands in for a replica, without an engine.

    python -m support.replica_double DESCRIPTOR PARENT

REPLICA_DOUBLE is JSON: what each replica does otherwise than answering everything, by rank, and
`log`, a folder in which each writes what it received, a line of JSON for each message.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchllm_operator.engine.replicas.messages import Channel, Started
from batchllm_operator.vllm_plugin.runahead.plan import ChainLimits

LIMITS = ChainLimits(block_size=16, num_blocks=100, max_step_tokens=256, max_model_len=1024)


def output(rank: int, request: dict[str, Any]) -> dict[str, Any]:
    """Of one request: its text says who has answered, and how large a group it was sent."""
    tokens = request["prompt_token_ids"]
    return {
        "request_idx": request["request_idx"],
        "text": f"{rank}/{request['group_size']}",
        "finish_reason": "stop",
        "num_prompt_tokens": len(tokens),
        "num_cached_tokens": request["num_prefix_tokens"],
        "num_output_tokens": 1,
        "error": None,
    }


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    told = json.loads(os.environ["REPLICA_DOUBLE"])
    _, start = channel.receive()
    rank = start["rank"]
    own = told.get(str(rank), {})
    log = (Path(told["log"]) / f"{rank}.jsonl").open("a", encoding="utf-8")

    def note(kind: str, content: Any) -> None:
        log.write(json.dumps([kind, content]) + "\n")
        log.flush()

    note("start", {**start, "path": sys.path})
    if "subject" in own:
        channel.send("find_profile", own["subject"])
        note("found", channel.receive()[1])
        if "profile" in own:
            channel.send("keep_profile", own["profile"])
    if "failed" in own or ("refuses_chain" in own and start["chain"]):
        kind, message = own.get("failed") or own["refuses_chain"]
        channel.send("failed", {"kind": kind, "message": message})
        return
    if own.get("starts") == "never":
        os.kill(os.getpid(), signal.SIGKILL)
    if own.get("starts") == "late":  # the other has died long before
        time.sleep(3)
    in_chain = start["chain"] is not None
    failure = own.get("chain_failure")
    rate = own.get("rate", 1e9) if in_chain and failure is None else None
    limits = replace(LIMITS, num_blocks=own.get("num_blocks", LIMITS.num_blocks))
    started = Started(
        own.get("max_in_flight", 8), limits if in_chain else None, rate, "double", failure
    )
    try:
        channel.send("started", asdict(started))
    except OSError:  # another one couldn't start
        note("closed", None)
        return
    if own.get("ends") == "started":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            kind, content = channel.receive()
        except (EOFError, OSError):
            note("closed", None)
            return
        note(kind, content)
        if kind == "requests":
            for request in content:
                if request["request_idx"] in own.get("dies_at", ()):
                    channel.send("died", "RuntimeError: out of luck")
                    return
                if request["request_idx"] in own.get("killed_at", ()):
                    os.kill(os.getpid(), signal.SIGKILL)
                if "silent" not in own:
                    channel.send("outputs", [output(rank, request)])
        elif kind == "prefill":
            if "dies_in_phase" in own:
                channel.send("died", "RuntimeError: out of luck")
                return
            failures = [own["phase_failure"]] if "phase_failure" in own else []
            computed = {
                each["group_id"]: own.get("computes", each["split"][rank]) for each in content
            }
            channel.send("prefilled", {"computed": computed, "failures": failures})
        elif "dies_measuring" in own:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            channel.send("measured", own.get("steps", [[64, 0, 0.5], [128, 0, 1.0]]))


if __name__ == "__main__":
    main()
