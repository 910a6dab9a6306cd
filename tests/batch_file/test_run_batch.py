"""`batchllm run-batch` with the fake engine: each line of a batch file gets one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from demo_model import build_demo_model
from support.batch_lines import COMPLETIONS, EMBEDDINGS, chat, line, read_lines, write_lines
from support.demo_job import OFFLINE, wait_until
from support.fork_server import ForkServer
from support.kubernetes.http_server import HttpServer, Request

from batchllm_operator.batch_file.run_batch import BatchFiles, run_batch
from batchllm_operator.cli import main
from batchllm_operator.errors import SpecError

FAKE = {"backend": "fake"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch") / "model"
    build_demo_model(folder, documents=["a question, and what it is about"])
    return folder


def answer(folder: Path, model: Path, *arguments: str, **changes: Any) -> dict[str, Any]:
    """Answer the file `in` of a folder; lines of errors go to the file that `errors` names."""
    errors, engine = changes.get("errors"), changes.get("engine", {})
    files = BatchFiles(str(folder / "in"), str(folder / "out"), errors, str(folder / "work"))
    return run_batch(files, str(model), arguments, {**FAKE, **engine}, {})


def test_a_bad_line_costs_only_itself(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.batch_file.lines._MAX_LINE_BYTES", 21 << 20)
    bad: dict[str, tuple[object, str]] = {
        "broken": (b'{"custom_id": "broken", "method"', "the line isn't JSON"),
        "longer": (b"[" * (23 << 20), "the line is longer than 22,020,096 bytes"),
        "latin": (b'{"custom_id": "caf\xe9"}', "the line isn't JSON"),
        "list": ([1], "isn't an object"),
        "nameless": ({**chat("x", "x"), "custom_id": 7}, "custom_id: must be a text"),
        "half": ({**chat("x", "x"), "custom_id": "\ud800"}, "surrogates not allowed"),
        "bodiless": ({**chat("bodiless", "x"), "body": None}, "body: must be an object"),
        "endpoint": (line("endpoint", "/v1/images", prompt="x"), "URL /v1/images was used"),
        "vector": (line("vector", EMBEDDINGS, input="x"), "Model does not support endpoint"),
        "model": (chat("model", "x", model="another"), "The model `another` does not exist."),
        "stream": (chat("stream", "x", stream=True), "stream: isn't supported"),
        "type": (chat("type", "x", temperature="hot"), "temperature: "),
        "range": (chat("range", "x", temperature=-1), "temperature"),
        "samples": (chat("samples", "x", n=2), "n must be 1 when using greedy sampling"),
        "length": (chat("length", "x", max_tokens=1 << 20), "cannot be greater than"),
        "tools": (chat("tools", "x", tools=[TOOL], tool_choice="required"), "tool_choice: "),
        "image": (chat("image", [{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        "ids": (line("ids", COMPLETIONS, prompt=[1, 2]), "token ids aren't taken"),
        "long": (chat("long", "x" * (20 << 20)), "prompt_too_long"),
    }
    good = [chat("first", "x"), b"", chat("twin", "y"), chat("twin", "z")]
    write_lines(tmp_path / "in", [*good, *(given for given, _ in bad.values()), chat("last", "x")])
    result = answer(tmp_path, model)
    lines = read_lines(tmp_path / "out")
    assert (result["num_lines"], result["num_errors"]) == (len(lines), len(bad))
    assert [each["custom_id"] for each in lines[:3]] == ["first", "twin", "twin"]
    assert lines[-1]["custom_id"] == "last"
    for name, each in zip(bad, lines[3:-1], strict=True):
        assert each["response"]["body"] is None, name
        error = each["error"]
        fault = error if isinstance(error, str) else error["error"]["message"]
        assert bad[name][1] in fault, name
        assert each["response"]["status_code"] == (404 if name == "model" else 400), name
        unknown = ("broken", "longer", "latin", "list", "nameless", "half")
        known = None if name in unknown else name
        assert each["custom_id"] == known
    texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in lines[:3]]
    assert len(set(texts)) == 3
    last = lines[-1]["response"]["body"]
    assert last["choices"][0]["message"]["content"] == texts[0]
    assert len({each["id"] for each in lines}) == len(lines)


def test_errors_go_to_a_file_of_their_own(tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "in", [chat("good", "x"), chat("bad", "x", model="another"), b"rubbish"])
    answer(tmp_path, model, errors=str(tmp_path / "errors"))
    assert [each["custom_id"] for each in read_lines(tmp_path / "out")] == ["good"]
    known, unknown = read_lines(tmp_path / "errors")
    assert (known["custom_id"], unknown["custom_id"]) == ("bad", None)
    assert known["error"] is None
    assert known["response"]["status_code"] == known["response"]["body"]["error"]["code"] == 404


def test_sets_of_parameters_are_prompts_of_one_job(tmp_path: Path, model: Path) -> None:
    lines: list[Any] = [chat(f"{idx}", "same", max_tokens=1 + idx % 3) for idx in range(9)]
    lines += [line("list", COMPLETIONS, prompt=["a", "b", "a"], max_tokens=2, temperature=0)]
    lines += [chat("named", "x", user="someone"), chat("biased", "x", logit_bias={"5": 1.0})]
    write_lines(tmp_path / "in", lines)
    assert answer(tmp_path, model)["num_sets"] == 6
    assert [each.name for each in tmp_path.glob("work/*/_batchllm/*")] == ["answers"]
    *_, prompts, named, biased = read_lines(tmp_path / "out")
    body = prompts["response"]["body"]
    first, second, third = body["choices"]
    assert first["text"] == third["text"] != second["text"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert body["id"].startswith("cmpl-")
    assert named["response"]["body"]["model"] == str(model)
    assert biased["error"] is None


def test_more_sets_than_a_job_has_are_refused_line_by_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.batch_file.lines.MAX_SETS", 2)
    write_lines(tmp_path / "in", [chat(f"{idx}", "x", seed=idx % 3) for idx in range(6)])
    assert answer(tmp_path, model)["num_errors"] == 2
    lines = read_lines(tmp_path / "out")
    (fault,) = {each["error"]["error"]["message"] for each in lines if each["error"]}
    assert "more than 2 different sets of parameters" in fault
    assert [bool(each["error"]) for each in lines] == [False, False, True] * 2


@pytest.mark.parametrize("lines", [[], [b"", b"  "], [b"{}"]])
def test_a_file_without_a_request_has_no_job(tmp_path: Path, model: Path, lines: list[Any]) -> None:
    write_lines(tmp_path / "in", lines)
    result = answer(tmp_path, model)
    assert (result["num_sets"], result["num_errors"]) == (0, len(read_lines(tmp_path / "out")))


def test_a_finished_file_is_only_written_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in", [chat(f"{idx}", f"q{idx}") for idx in range(5)])
    answer(tmp_path, model)
    before = (tmp_path / "out").read_bytes()
    (tmp_path / "out").unlink()
    with monkeypatch.context() as patch:
        patch.delattr("batchllm_operator.batch_file.run_batch.plan_job")
        answer(tmp_path, model, engine={"max_num_seqs": 7})  # decides no answer
    assert (tmp_path / "out").read_bytes() == before
    write_lines(tmp_path / "in", [chat("other", "x")])
    assert answer(tmp_path, model)["num_lines"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_call_goes_on(
    tmp_path: Path, model: Path, engines: ForkServer, number: signal.Signals
) -> None:
    lines = [chat(f"{idx}", f"q{idx}", max_tokens=1 + idx % 2) for idx in range(20)]
    write_lines(tmp_path / "in", lines)
    slow = json.dumps({**FAKE, "extra_args": {"delay_s": 0.3, "max_in_flight": 1}})
    arguments = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    arguments += ["--model", str(model), "--max-model-len", "512", "--engine", slow]
    environment = {**os.environ, **OFFLINE}
    stopped = engines.start("batchllm_operator", arguments, env=environment)
    attempt = "out.work/*/_batchllm/answers/*/plan-*/runs/shard-00000/attempt-0000"
    wait_until(lambda: list(tmp_path.glob(f"{attempt}1/progress.json")), "the run has begun")
    (read,) = tmp_path.glob("out.work/*/sets.json")
    before = read.stat().st_mtime_ns
    os.kill(stopped.pid, number)
    stopped.wait(60)
    assert not (tmp_path / "out").exists()
    again = engines.run("batchllm_operator", arguments, env=environment)
    assert again.returncode == 0, again.stderr
    assert "20 lines, 0 with an error" in again.stdout
    assert list(tmp_path.glob(f"{attempt}2")) and read.stat().st_mtime_ns == before
    custom_ids = [each["custom_id"] for each in read_lines(tmp_path / "out")]
    assert custom_ids == [f"{idx}" for idx in range(20)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chat-template", "x"], "unrecognized arguments: --chat-template"),
        (["--max-model-len", "long"], "--max-model-len"),
        (["--data-parallel-size", "2"], "data_parallel_size"),
    ],
)
def test_arguments_that_cant_be_honoured_are_refused_by_name(
    tmp_path: Path, model: Path, arguments: list[str], reason: str
) -> None:
    write_lines(tmp_path / "in", [chat("x", "x")])
    files = BatchFiles(str(tmp_path / "in"), str(tmp_path / "out"), None, str(tmp_path / "work"))
    with pytest.raises(SpecError, match=reason):
        run_batch(files, str(model), arguments, {}, {})


def test_files_may_be_on_the_web(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(json.dumps(chat(f"{idx}", f"q{idx}")) for idx in range(3)).encode()
    stored = {"/in": text}

    def serve(request: Request) -> None:
        if request.command == "PUT" and request.path != "/locked":
            stored[request.path] = request.body
        code = 403 if request.path == "/locked" else 200 if request.path in stored else 404
        request.send_bytes(code, stored.get(request.path, b""))

    server = HttpServer(serve)
    try:
        for source, target, reason in (
            ("in", "out", None),
            ("none", "out", "none: there is no such file"),
            ("locked", "out", "locked: 403"),
            ("in", "locked", "locked: 403"),
        ):
            command = ["run-batch", "-i", f"{server.url}/{source}", "-o", f"{server.url}/{target}"]
            command += ["--model", str(model), "--engine", json.dumps(FAKE)]
            assert main(command) != 0
            assert "--work: needed" in capsys.readouterr().err
            assert (main([*command, "--work", str(tmp_path)]) == 0) == (reason is None)
            assert reason is None or reason in capsys.readouterr().err
    finally:
        server.close()
    custom_ids = [json.loads(each)["custom_id"] for each in stored["/out"].splitlines()]
    assert custom_ids == ["0", "1", "2"]


def test_files_that_cant_be_replaced_are_refused(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "out")
    write_lines(tmp_path / "in", [chat("x", "x")])
    with pytest.raises(SpecError, match="isn't a regular file"):
        answer(tmp_path, model)
    with pytest.raises(SpecError, match="there is no such file"):
        answer(tmp_path / "nowhere", model)
