"""A model's files, in folders and on a hub that answers, refuses or is out of reach; versions."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import huggingface_hub.hf_api
import numpy as np
import pytest
from model.test_adapters import COMMITS, publish
from safetensors.numpy import save_file

from batchllm_operator.errors import ModelError
from batchllm_operator.model import ModelFiles, files, folder_digest

NAME = "we/base"


class _Hub(BaseHTTPRequestHandler):
    """A hub that counts requests, and answers each with the server's status."""

    server: Any

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        if self.server.status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), _Hub)
    server.status, server.paths = 503, []
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("status", [500, 503, 404])
def test_a_hub_that_does_not_help_is_asked_once(hub: Any, status: int) -> None:
    hub.status = status
    with pytest.raises(ModelError) as caught:
        ModelFiles(NAME)
    message = str(caught.value)
    assert len(hub.paths) == 1
    assert f"model {NAME}: the hub" in message
    assert "a folder begins with ./, ../, ~/ or /" in message
    assert ("HF_TOKEN" in message) == (status == 404)


def test_a_hub_out_of_reach_leaves_what_its_cache_has(hub: Any, tmp_path: Path) -> None:
    folder = publish(tmp_path, NAME, COMMITS[0])
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    own = ModelFiles(NAME)
    assert (own.is_cached, own.folder, own.names) == (True, folder, frozenset({"config.json"}))
    assert own.read_json("config.json") == {"model_type": "qwen2"}


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "isn't JSON"), ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull")],
)
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"its config\.json .*{message}"):
        ModelFiles(str(tmp_path)).read_json("config.json")


def test_a_path_of_one_file_asks_for_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        ModelFiles(str(path))


# Versions of folders


def test_the_version_of_a_folder_changes_with_its_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(files, "_END_BYTES", 10)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 1)
    monkeypatch.setattr(files, "_NUM_SAMPLES", 4)
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(1000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    versions = [folder_digest(tmp_path)]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "download.lock").write_text("x")
    assert folder_digest(tmp_path) == versions[0]
    for position in (5, 500, 995):  # only some of a large file is read
        weights[position] = 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        versions.append(folder_digest(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    versions.append(folder_digest(tmp_path))
    assert len(set(versions)) == 5


@pytest.mark.parametrize("changed", ["model.layers.0.mlp.up_proj", "model.layers.1.k_proj"])
def test_the_version_of_a_folder_changes_with_each_tensor(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters merged into the weights leave sizes and both ends of the files as they were."""
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(files, "_END_BYTES", 1000)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 16)
    names = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.k_proj", "model.norm"]
    weights = {name: np.zeros((64, 64), np.float16) for name in names}
    versions = []
    for _ in range(2):
        save_file(weights, tmp_path / "model.safetensors")
        versions.append(folder_digest(tmp_path))
        weights[changed] = weights[changed] + np.float16(0.5)
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    "header", [b"", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, 1e9]}}', b'{"a": {}}', b"\xff"]
)
def test_weights_that_are_not_what_they_are_called_have_a_version(
    tmp_path: Path, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    data = len(header).to_bytes(8, "little") + header + bytes(200)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert folder_digest(tmp_path).startswith("sha256:")
