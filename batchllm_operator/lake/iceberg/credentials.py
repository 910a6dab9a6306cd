"""Storage credentials that a catalog lends with a table: the next are fetched before they end."""

import time
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Final

from pyiceberg.io import FileIO, InputFile, OutputFile

_TOKENS: Final = ("s3.session-token", "gcs.oauth2.token", "adls.sas-token")
_END: Final = "expiration-time"  # of Polaris
_USED: Final = 0.75
"""Share of their time in which files are opened with credentials, and may be read on with them."""
_SHORTEST_S: Final = 900.0
"""Their time if the catalog doesn't say it: the shortest that AWS gives."""


class LentFileIO(FileIO):
    """The files of a table, with credentials that last; `lend` asks the catalog for new ones."""

    def __init__(self, lent: FileIO, lend: Callable[[], FileIO]) -> None:
        super().__init__(lent.properties)
        self._lend, self._lock = lend, Lock()
        self._files, self._renewal = lent, _renewal(lent)

    def new_input(self, location: str) -> InputFile:
        return self._current().new_input(location)

    def new_output(self, location: str) -> OutputFile:
        return self._current().new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self._current().delete(location)

    def _current(self) -> FileIO:
        with self._lock:  # pyiceberg reads manifests in threads
            if time.time() >= self._renewal:
                self._files = self._lend()
                self._renewal = _renewal(self._files)
            return self._files


def _renewal(files: FileIO) -> float:
    """When new credentials are due, a second from now at least, whatever the clocks say."""
    now, properties = time.time(), files.properties
    tokens = [name for name in properties if name.startswith(_TOKENS)]
    ends = (
        properties.get(name, "") for name in (_END, *tokens) if name == _END or "expires" in name
    )
    end_s = min((int(end) / 1000 for end in ends if end.isdigit()), default=now + _SHORTEST_S)
    return now + max(1.0, _USED * (end_s - now)) if tokens else inf
