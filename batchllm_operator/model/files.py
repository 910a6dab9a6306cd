"""The files of a model or an adapter, in a folder or on the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from batchllm_operator.errors import ModelError

_TIMEOUT_S: Final = 10
_HINT: Final = "a folder begins with ./, ../, ~/ or /"
_QUANTIZED_NAME: Final = re.compile(r".+:(UD-)?(I?Q\d\w*|TQ\d\w*|BF16|F16|F32)", re.IGNORECASE)
"""How llama.cpp and others name one file of a hub's model."""
_LFS_START: Final = b"version https://git-lfs."


class ModelFiles:
    """Names and contents of a model's files.

    Args:
        path: an absolute folder, or a name on the hub.
        revision: branch, tag or commit on the hub.
        where: what the files are of, in messages.

    Attributes:
        names: of the files in the folder itself; on the hub, of all files; in the hub's cache, of
            those that were loaded.
        folder: where they lie; None for files on the hub, which are loaded when they are read.
        is_cached: whether they lie in the hub's cache, and the hub can't be reached.

    Raises:
        ModelError: there is no such folder or name, or the hub can't be reached and its cache lacks
            it; or `path` is a GGUF file.
    """

    def __init__(self, path: str, revision: str | None = None, where: str | None = None) -> None:
        self._path, self._revision = path, revision
        self.where = where or f"model {path}"
        if path.lower().endswith(".gguf") or _QUANTIZED_NAME.fullmatch(path):
            raise self.gguf_error()
        self.is_cached = False
        self.folder: Path | None = None
        if Path(path).is_absolute():
            self.folder = self._local_folder()
            self.names = _names(self.folder)
        else:
            self.names = self._names_on_hub()

    def gguf_error(self) -> ModelError:
        """Refuses a model of GGUF files."""
        return ModelError(
            f"{self.where}: GGUF isn't supported; use the model's folder or hub name with"
            " safetensors, from which a GGUF file is made, or convert it (transformers loads one"
            " with gguf_file=..., and save_pretrained writes safetensors)"
        )

    def find(self, name: str) -> Path | None:
        """The path of a file, such as `1_Pooling/config.json`; None if there is none.

        Raises:
            ModelError: it can't be loaded from the hub.
        """
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
        """What a file of JSON holds; None if there is no such file.

        Raises:
            ModelError: it can't be read, or isn't JSON.
        """
        if (path := self.find(name)) is None:
            return None
        try:
            data = path.read_bytes()
            return json.loads(data)
        except OSError as error:
            raise ModelError(f"{self.where}: its {name} can't be read: {error}") from error
        except (ValueError, RecursionError) as error:
            if fault := pointer_fault(data):
                raise ModelError(f"{self.where}: its {name} {fault}") from error
            raise ModelError(f"{self.where}: its {name} isn't JSON") from error

    def _local_folder(self) -> Path:
        folder = Path(self._path)
        try:
            if folder.is_dir():
                return folder
            is_file = folder.is_file()
        except OSError:  # the name is too long
            is_file = False
        fault = "is a file; give the folder that holds it" if is_file else "there is no such folder"
        raise ModelError(f"{self.where}: {fault}")

    def _names_on_hub(self) -> frozenset[str]:
        from huggingface_hub import HfApi  # a quarter of a second to import
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        try:
            # One short request. Loading a file from a hub that doesn't answer takes a minute.
            found = HfApi().model_info(self._path, revision=self._revision, timeout=_TIMEOUT_S)
            return frozenset(file.rfilename for file in found.siblings or ())
        except HFValidationError as error:
            fault = f"is neither a folder nor a name on the hub, such as owner/model ({_HINT})"
            raise ModelError(f"{self.where}: {fault}") from error
        # No network, no rights, no such name: what was loaded before may be used.
        except Exception as error:
            self.folder = self._cached_folder()
            if self.folder is None:
                fault = "the hub doesn't answer, and the model isn't in its cache here"
                if isinstance(error, RepositoryNotFoundError):
                    fault = "the hub has no such model, or wants an access token (HF_TOKEN)"
                raise ModelError(f"{self.where}: {fault} ({_HINT}): {one_line(error)}") from error
            self.is_cached = True
            return _names(self.folder)

    def _cached_folder(self) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            options: dict[str, Any] = {"revision": self._revision, "local_files_only": True}
            return Path(snapshot_download(self._path, **options))
        except LocalEntryNotFoundError:
            return None


def pointer_fault(data: bytes) -> str | None:
    """What is wrong with a file that begins like this, if it is a pointer of Git LFS."""
    if data.startswith(_LFS_START):
        return "is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
    return None


def one_line(error: BaseException) -> str:
    """An error of a library in one line: its first, with what follows if that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    return " ".join(lines[:3]) if lines[0].endswith(":") else lines[0]


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ModelError(f"model {folder}: can't be listed: {error}") from error
