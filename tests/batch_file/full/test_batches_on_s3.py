"""A batch whose files, and folder of work, are in a store."""

import json
from pathlib import Path

from demo_model import build_demo_model
from s3fs import S3FileSystem
from support.batch_lines import chat

from batchllm_operator.batch_file.run_batch import BatchFiles, run_batch


def test_files_may_be_in_a_store(tmp_path: Path, s3_bucket: str) -> None:
    build_demo_model(tmp_path / "model", documents=["a question, and what it is about"])
    names = ("in.jsonl", "out.jsonl", "errors.jsonl", "work")
    files, store = BatchFiles(*(f"{s3_bucket}/{name}" for name in names)), S3FileSystem()
    lines = [chat("a", "x"), chat("b", "x", model="another"), chat("c", "y")]
    store.pipe_file(files.input, "\n".join(map(json.dumps, lines)).encode())
    for _ in range(2):
        run_batch(files, str(tmp_path / "model"), [], {"backend": "fake"}, {})
        out, errors = (store.cat_file(f"{s3_bucket}/{name}").splitlines() for name in names[1:3])
        assert [json.loads(each)["custom_id"] for each in out] == ["a", "c"]
        assert [json.loads(each)["custom_id"] for each in errors] == ["b"]
        store.rm_file(files.output)
