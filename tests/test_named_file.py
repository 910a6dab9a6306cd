"""What is printed and written: to files that a user names, and where no reader is left."""

import argparse
import errno
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import pytest
from conftest import Batchllm

from batchllm_operator.errors import StorageError
from batchllm_operator.named_file import parse_file, write_file

COMMAND = [sys.executable, "-m", "batchllm_operator"]


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    path.write_text("old")
    path.chmod(0o640)
    with path.open() as reader:
        write_file(path, b"new")
        assert reader.read() == "old", "who reads it meanwhile sees no half"
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_fails_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(StorageError, match=r"result\.json can't be written: disk full"):
        write_file(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("method", ["replace", "open"])
def test_a_file_that_cannot_be_replaced_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Something is mounted on it, or it is mounted into a file system to read only."""
    path, real_open = tmp_path / "termination-log", Path.open
    path.write_text("something longer")

    def refuse(self: Path, *arguments: Any, **options: Any) -> IO[Any]:
        if method == "replace":
            raise OSError(errno.EBUSY, "Device or resource busy")
        if arguments == ("xb",):
            raise OSError(errno.EROFS, "Read-only file system")
        opened: IO[Any] = real_open(self, *arguments, **options)
        return opened

    monkeypatch.setattr(Path, method, refuse)
    write_file(parse_file(str(path)), b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("something longer")
    link.symlink_to("target")
    dangling.symlink_to("made")
    for path in (parse_file(str(link)), parse_file(str(dangling))):
        write_file(path, b"new")
    assert link.is_symlink() and dangling.is_symlink()
    assert target.read_bytes() == (tmp_path / "made").read_bytes() == b"new"


def test_a_pipe_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_file(parse_file(str(pipe)), b"new")
    reader.join(60)
    assert read == [b"new"] and pipe.is_fifo()


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    null, full = tmp_path / "null", tmp_path / "full"
    try:
        os.mknod(null, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        null.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    write_file(parse_file(str(null)), b"new")
    with pytest.raises(StorageError, match="full can't be written: No space left"):
        write_file(full, b"new")
    assert null.is_char_device() and full.is_char_device()


@pytest.mark.parametrize("way", ["/dev/stdout", "/proc/self/fd/1", "out"])
def test_what_stdout_goes_to_gets_the_result_after_what_was_printed(
    tmp_path: Path, way: str
) -> None:
    code = (
        "import sys; from pathlib import Path; from batchllm_operator.named_file import write_file;"
        f"print('printed'); write_file(Path({way!r}), b'result'); print(' after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_text() == "printed\nresult after\n"


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "lost").symlink_to("none/file")
    bound = socket.socket(socket.AF_UNIX)
    with bound:
        bound.bind(str(tmp_path / "socket"))
        for name, reason in (
            ("none/file", "there is no folder .*none"),
            ("lost", "there is no folder .*none"),
            ("", "is a folder"),
            (".", "is a folder"),
            ("socket", "is a socket"),
            ("circle", "circle can't be written: Too many levels"),
            ("n" * 300, "can't be written: File name too long"),
        ):
            with pytest.raises(argparse.ArgumentTypeError, match=reason):
                parse_file(str(tmp_path / name) if name else "")


@pytest.mark.parametrize("command", [["plan", "--job", "x"], ["run"], ["report", "--plan", "x"]])
def test_commands_refuse_it_before_they_begin(
    batchllm: Batchllm, tmp_path: Path, command: list[str]
) -> None:
    option = "--out" if command[0] == "report" else "--result"
    done = batchllm(*command, option, tmp_path / "none" / "file")
    assert done.code == 2
    assert f"argument {option}: there is no folder {tmp_path / 'none'}" in done.err


def test_files_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run as root, too, who may."""
    path, new = tmp_path / "file", tmp_path / "new"
    path.touch()
    allowed: set[Path] = set()
    monkeypatch.setattr(os, "access", lambda path, mode: path in allowed)
    for each in (path, new):
        with pytest.raises(argparse.ArgumentTypeError, match="no permission"):
            parse_file(str(each))
    allowed.add(path)
    assert parse_file(str(path)) == path, "written in place"
    allowed.symmetric_difference_update({path, tmp_path})
    assert parse_file(str(path)) == path and parse_file(str(new)) == new


# Standard streams where nobody reads them, or where nothing can be written


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["schema"], ["--version"]])
def test_a_closed_pipe_is_silent(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141 or (arguments == ["--version"] and unbuffered)


@pytest.mark.parametrize("arguments", [["schema"], ["--version"]])
def test_a_full_disk_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        out = full.open("w")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with out:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert re.fullmatch("batchllm: error: .*No space left on device\n", done.stderr)
    assert done.returncode == 1


def test_closed_streams_keep_nothing_from_working(tmp_path: Path) -> None:
    result = tmp_path / "gc.json"
    job = tmp_path / "none.yaml"
    code = f"exec {sys.executable} -m batchllm_operator"
    closed = subprocess.run(
        ["bash", "-c", f'{code} schema >&- 2>&-; exec 2>&-; {code} gc --job "$1"', "-", job],
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert closed.returncode == 0
    done = subprocess.run(
        ["bash", "-c", f'{code} gc --job "$1" --result "$2" >&-', "-", job, result],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
