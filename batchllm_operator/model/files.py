"""The files of a model or an adapter, in a folder or on the hub, and a digest of a folder."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from batchllm_operator.errors import ModelError, one_line

_TIMEOUT_S: Final = 10
_HINT: Final = "a folder begins with ./, ../, ~/ or /"
_QUANTIZED_NAME: Final = re.compile(r".+:(UD-)?(I?Q\d\w*|TQ\d\w*|BF16|F16|F32)", re.IGNORECASE)
"""How llama.cpp and others name one file of a hub's model."""
_WHOLE_FILE_BYTES: Final = 16 << 20
_END_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 1 << 12
_NUM_SAMPLES: Final = 256
"""Samples of a large file that isn't safetensors."""


class ModelFiles:
    """Names and contents of a model's files, in an absolute folder or by a name on the hub.

    Attributes:
        names: of the files in the folder itself; on the hub, of all; in its cache, of those there.
        folder: where they lie; None for files on the hub, which are loaded when they are read.
        is_cached: whether they lie in the hub's cache, and the hub can't be reached.

    Raises:
        ModelError: there is no such folder or name, or the hub can't be reached and its cache lacks
            it; or the path is a GGUF file. Later, a file can't be loaded or read.
    """

    def __init__(self, path: str, revision: str | None = None, where: str | None = None) -> None:
        self._path, self._revision = path, revision
        self.where = where or f"model {path}"
        if path.lower().endswith(".gguf") or _QUANTIZED_NAME.fullmatch(path):
            raise self.gguf_error()
        self.is_cached = False
        self.folder = Path(path) if Path(path).is_absolute() else None
        self.names = self._names_on_hub() if self.folder is None else self._names(self.folder)

    def gguf_error(self) -> ModelError:
        """Refuses a model of GGUF files."""
        return ModelError(
            f"{self.where}: GGUF isn't supported; use the model's folder or hub name with"
            " safetensors, from which a GGUF file is made, or convert it (transformers loads one"
            " with gguf_file=..., and save_pretrained writes safetensors)"
        )

    def find(self, name: str) -> Path | None:
        """The path of a file, such as `1_Pooling/config.json`; None if there is none."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        if name not in self.names:
            return None
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self._path, name, revision=self._revision))
        except Exception as error:  # no network, no rights, a full disk
            raise ModelError(f"{self.where}: {name} can't be loaded: {one_line(error)}") from error

    def read_json(self, name: str) -> Any:
        """What a file of JSON holds; None if there is no such file."""
        if (path := self.find(name)) is None:
            return None
        try:
            data = path.read_bytes()
            return json.loads(data)
        except OSError as error:
            raise ModelError(f"{self.where}: its {name} can't be read: {error}") from error
        except (ValueError, RecursionError) as error:
            fault = pointer_fault(data) or "isn't JSON"
            raise ModelError(f"{self.where}: its {name} {fault}") from error

    def read_mapping(self, name: str) -> dict[str, Any]:
        """What a file of JSON maps; empty if there is no such file, or it holds anything else."""
        content = self.read_json(name)
        return content if isinstance(content, dict) else {}

    def _names(self, folder: Path) -> frozenset[str]:
        try:
            return frozenset(path.name for path in folder.iterdir() if path.is_file())
        except NotADirectoryError:
            fault = "is a file; give the folder that holds it"
        except FileNotFoundError:
            fault = "there is no such folder"
        except OSError as error:
            fault = f"can't be listed: {error}"
        raise ModelError(f"{self.where}: {fault}")

    def _names_on_hub(self) -> frozenset[str]:
        from huggingface_hub import HfApi  # a quarter of a second to import
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        try:
            # One short request. Loading a file from a hub that doesn't answer takes a minute.
            info = HfApi().model_info(self._path, revision=self._revision, timeout=_TIMEOUT_S)
            return frozenset(file.rfilename for file in info.siblings or ())
        except HFValidationError as error:
            fault = f"is neither a folder nor a name on the hub, such as owner/model ({_HINT})"
            raise ModelError(f"{self.where}: {fault}") from error
        # No network, no rights, no such name: what was loaded before may be used.
        except Exception as error:
            self.folder, self.is_cached = cached_folder(self._path, self._revision), True
            if self.folder is not None:
                return self._names(self.folder)
            fault = "the hub doesn't answer, and the model isn't in its cache here"
            if isinstance(error, RepositoryNotFoundError):
                fault = "the hub has no such model, or wants an access token (HF_TOKEN)"
            raise ModelError(f"{self.where}: {fault} ({_HINT}): {one_line(error)}") from error


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the hub's cache on this machine; None if it isn't there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not loaded yet, or no name of the hub
        return None


def pointer_fault(data: bytes) -> str | None:
    """What is wrong with a file that begins like this, if it is a pointer of Git LFS."""
    is_pointer = data.startswith(b"version https://git-lfs.")
    fault = "is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
    return fault if is_pointer else None


def folder_digest(folder: Path) -> str:
    """A digest of a model's folder: names, sizes, and content.

    Of a file above 16 MiB (weights) it reads the first and the last MiB, and the beginning, middle
    and end of each tensor: training may change only some tensors, anywhere in the file.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue  # files of downloaders and version control
        size = path.stat().st_size
        digest.update(f"{name.as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for start, num_bytes in _samples(file, size):
                file.seek(start)
                digest.update(file.read(num_bytes))
    return f"sha256:{digest.hexdigest()}"


def _samples(file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the samples of a large file."""
    tensors = _tensors(file, size) or [
        (size * number // _NUM_SAMPLES, size * (number + 1) // _NUM_SAMPLES)
        for number in range(_NUM_SAMPLES)
    ]
    yield 0, _END_BYTES
    for start, end in tensors:
        for place in (start, (start + end) // 2, end - _SAMPLE_BYTES):
            yield max(start, place), min(_SAMPLE_BYTES, end - start)
    yield max(0, size - _END_BYTES), _END_BYTES


def _tensors(file: IO[bytes], size: int) -> list[tuple[int, int]]:
    """(begin, end) of the tensors of a safetensors file; empty for other files.

    Its first 8 bytes are the length of the JSON header, which gives offsets from its own end.
    """
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > size:
        return []
    try:
        header = json.loads(file.read(start - 8))
        offsets = [
            tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"
        ]
        places = sorted((start + int(first), start + int(end)) for first, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return places if all(start <= first <= end <= size for first, end in places) else []
