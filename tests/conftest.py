"""Storage on local disk and S3, and the command line in this process."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from hypothesis import settings

if "support" not in sys.modules:  # tests import this module, too
    pytest.register_assert_rewrite("support")  # before the first import from there
    # Read once, when Airflow is imported. Each process of the tests has a home of its own.
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="batchllm-airflow-")
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)

from support.fork_server import ForkServer

if TYPE_CHECKING:
    from support.lake_tables import Lake

# No test depends on how fast the machine is. `make test` tries the same few examples each time,
# `make test-all` (--hypothesis-profile=full) as many as a test asks for.
settings.register_profile("full", deadline=None)
settings.register_profile("batchllm", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("batchllm")

# Read once, when these libraries are imported: no test may reach for a model on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Triton's own functions are made for the interpreter or for a GPU when they are imported, so this
# comes before every import. Tests of the compiler run in processes of their own.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it has been; Triton 3.9 warns of a new default

# What tests import (vLLM, Airflow, torch) stays: a third of collecting's CPU time, and a quarter of
# the tests', would go into looking through it for garbage.
gc.disable()

FORMATS = ("parquet", "iceberg", "delta")
FORKING_ENGINES = (
    "tests/e2e/",
    "tests/vllm_plugin/full/test_trace.py",
    "tests/runahead/full/",
)


def pytest_configure() -> None:
    """Tests send signals, which a shell's background jobs ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """From here on there is garbage to collect, but none of it in what has been imported."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which cluster tests of pods use: by default a double of one."""
    group = parser.getgroup("kubernetes")
    group.addoption("--kubeconfig", metavar="FILE", help="use this cluster, not the double")
    group.addoption(
        "--kube-nodes",
        action="store_true",
        help="that cluster has nodes, which run on this machine",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, files whose tests fork engines share one process, its imported vLLM
    and the demo's model.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/e2e" if file.startswith(FORKING_ENGINES) else file

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def memory_of_a_command() -> Iterator[None]:
    """Plans in this process take the memory of a process of their own for what they start with.

    A budget is for all that the process holds; here, that is vLLM and the engines of other tests.
    """
    if find_spec("pyarrow") is None:  # a GPU's host that only tests the kernels
        yield
        return
    from batchllm_operator.plan import memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_resident_bytes", lambda: 400 << 20)
        yield


@dataclass(frozen=True)
class CommandOutcome:
    """What a `batchllm` command left behind."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines on stderr that report an error."""
        return [line for line in self.err.splitlines() if "error" in line.lower()]


Batchllm = Callable[..., CommandOutcome]


@pytest.fixture
def batchllm(capsys: pytest.CaptureFixture[str]) -> Iterator[Batchllm]:
    """Run a `batchllm` command in this process, with the stderr that a user would see."""
    from batchllm_operator.cli import main

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    level = logging.getLogger("batchllm_operator").level

    def run(*args: object) -> CommandOutcome:
        root = logging.getLogger()
        root_handlers, root_level = root.handlers, root.level
        root.handlers = []  # pytest's own keep the command from logging to stderr
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:  # argparse
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            root.handlers = root_handlers
            root.setLevel(root_level)
        return CommandOutcome(int(code), *capsys.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.getLogger("batchllm_operator").setLevel(level)


@pytest.fixture(scope="session")
def commands() -> Iterator[ForkServer]:
    """Starts `batchllm` commands as processes (module `batchllm_operator`), without imports.

    Not for those that start vLLM.
    """
    rooms = (
        "plan.plan_job",
        "run.run_shards",
        "commit.commit_run",
        "inspect.verify",
        "cli",
        "metrics",
    )
    server = ForkServer("s3fs", *(f"batchllm_operator.{each}" for each in rooms))
    yield server
    server.close()


@pytest.fixture(scope="session")
def engines() -> Iterator[ForkServer]:
    """The same for commands that start vLLM, and for modules in tests/ that do."""
    server = ForkServer("support.engine_imports")
    yield server
    server.close()


def real_model(name: str) -> Path:
    """The folder of a real model (`scripts/real_models.py`), made if need be.

    Where its packages can't be had, the test is skipped, but fails where CI has to have them.
    """
    from real_models import UnavailableError, ensure

    try:
        return ensure(name)
    except UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, which writes texts that make sense."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, whose vectors of similar sentences are close."""
    return real_model("minilm")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server on a loopback port; no client of it outlives it."""
    from moto.moto_server.werkzeug_app import create_backend_app

    from batchllm_operator.storage.s3 import S3Files

    S3Files.clear_instance_cache()
    with served(create_backend_app("s3")) as endpoint:
        yield endpoint
        S3Files.clear_instance_cache()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """A WSGI application's address on a loopback port.

    Clients keep their connections, as with S3, where moto's own server closes each and looks for
    the service among all of AWS: twice the CPU time.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, name="server")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user of `s3_endpoint`. Tests share a client, to save time."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def fresh_s3_client(s3_environment: None) -> Iterator[None]:
    """For tests that change the environment: a client is made in it, and forgotten after."""
    from batchllm_operator.storage.s3 import S3Files

    S3Files.clear_instance_cache()
    yield
    S3Files.clear_instance_cache()


@pytest.fixture
def s3_bucket(s3_environment: None) -> str:
    """A new bucket."""
    from s3fs import S3FileSystem

    name = f"lake-{uuid.uuid4().hex[:12]}"
    S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def lake_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for tables that has nothing in it yet: on local disk, or in a store (`ON_S3`)."""
    store = getattr(request, "param", "local")
    if store == "local":
        return str(tmp_path / "lake")
    bucket: str = request.getfixturevalue(f"{store}_bucket")
    return f"{bucket}/lake"


@pytest.fixture(params=FORMATS)
def lake(
    request: pytest.FixtureRequest, lake_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Lake:
    """A place for a table, in each format."""
    from support.lake_tables import LAKES

    return LAKES[request.param](lake_uri, tmp_path, monkeypatch)


@pytest.fixture(params=FORMATS)
def lakes(
    request: pytest.FixtureRequest, lake_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Lake, Lake]:
    """Places for a job's input and its output, in each format."""
    from support.lake_tables import LAKES

    make = LAKES[request.param]
    source, target = (make(lake_uri, tmp_path, monkeypatch, name) for name in ("docs", "out"))
    return source, target


@pytest.fixture(scope="session")
def google_storage() -> Any:
    """A double of Google Cloud Storage."""
    from moto.moto_server.werkzeug_app import create_backend_app
    from support.google_storage import GoogleStorage

    return GoogleStorage(create_backend_app("s3"))


@pytest.fixture(scope="session")
def gs_endpoint(google_storage: Any) -> Iterator[str]:
    """It, on a loopback port."""
    with served(google_storage) as endpoint:
        yield endpoint


@pytest.fixture
def gs_bucket(gs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket."""
    account = {"gcs_base_url": gs_endpoint, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    name = f"lake-{uuid.uuid4().hex[:12]}"
    urlopen(Request(f"{gs_endpoint}/{name}", method="PUT")).close()
    return f"gs://{name}"


@pytest.fixture(scope="session")
def azure_endpoint() -> Iterator[str]:
    """An account of Azure's Blob Storage, by Azurite."""
    from support.azurite import azurite

    with azurite() as endpoint:
        yield endpoint


@pytest.fixture
def azure_bucket(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new container."""
    from pyarrow.fs import AzureFileSystem
    from support.azurite import ACCOUNT, KEY

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure_endpoint)
    name = f"lake-{uuid.uuid4().hex[:12]}"
    place = {"blob_storage_authority": azure_endpoint.split("/")[2], "blob_storage_scheme": "http"}
    AzureFileSystem(account_name=ACCOUNT, account_key=KEY, **place).create_dir(name)
    return f"abfss://{name}@{ACCOUNT}.dfs.core.windows.net"
