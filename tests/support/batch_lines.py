"""Lines of OpenAI's batch files, and `batchllm run-batch` over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.demo_job import OFFLINE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
SCORES, RERANK = "/score", "/rerank"
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, content: Any, **body: Any) -> dict[str, Any]:
    """A greedy question, unless `body` says otherwise."""
    messages = [{"role": "user", "content": content}]
    return line(custom_id, CHAT, **{"messages": messages, **GREEDY, **body})


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """Write a file of lines: bytes as they are, anything else as JSON."""
    with path.open("wb") as file:
        for each in lines:
            file.write(each if isinstance(each, bytes) else json.dumps(each).encode())
            file.write(b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


def stock_lines(path: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `vllm run-batch` answers, in a process of its own."""
    output = path.with_suffix(".stock")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(path)]
    command += ["-o", str(output), "--model", str(model), *arguments]
    environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"}
    for name in ("TRITON_INTERPRET", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        environment.pop(name, None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return read_lines(output)


def comparable(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without what differs from call to call, and without the messages of errors."""
    for each in lines:
        del each["id"], each["response"]["request_id"]
        body = each["response"]["body"] or {}
        if "id" in body:
            body["id"] = body["id"].partition("-")[0]
        for name in ("created", "system_fingerprint"):
            body.pop(name, None)
        if isinstance(each["error"], dict):
            each["error"]["error"].pop("message")
    return list(lines)
