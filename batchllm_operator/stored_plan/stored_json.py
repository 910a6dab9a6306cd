"""JSON files in the lake: one version of each is read, and what is wrong with a file is typed."""

import json
from typing import Any, ClassVar, Self, get_args

from pydantic import ValidationError

from batchllm_operator.errors import DamagedFileError, PlanError
from batchllm_operator.spec.faults import describe
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Frozen


class StoredJson(Frozen):
    """A model stored as a JSON file, with a field for the one version that can be read.

    Subclasses set what errors call the file, the name of that field, whose type is a `Literal` of
    the version, and what to do about a file that can't be read.
    """

    what: ClassVar[str]
    version_field: ClassVar[str]
    cure: ClassVar[str] = "remove it"

    @classmethod
    def read(cls, folder: Folder, name: str, **belongs: object) -> Self | None:
        """The file in a folder; None if there is none.

        Args:
            belongs: fields, with the values that they have in a file that belongs there.

        Raises:
            DamagedFileError: the file belongs elsewhere; or see `from_bytes`.
            PlanError: see `from_bytes`.
        """
        try:
            data = folder.read_bytes(name)
        except FileNotFoundError:
            return None
        where = f"{folder.uri}/{name}"
        stored = cls.from_bytes(data, source=where)
        if any(getattr(stored, field) != value for field, value in belongs.items()):
            raise DamagedFileError(f"{cls.what} {where}: belongs elsewhere; {cls.cure}")
        return stored

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Self:
        """Read the stored form; `source` names it in errors.

        Raises:
            DamagedFileError: it isn't whole, or isn't one of ours.
            PlanError: it is of another version.
        """
        where = f"{cls.what} {source}"
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{where}: is corrupted: it isn't JSON; {cls.cure}") from error
        version = fields.get(cls.version_field) if isinstance(fields, dict) else None
        if version is None:
            reason = f"isn't a {cls.what} of ours: it has no {cls.version_field}"
            raise DamagedFileError(f"{where}: {reason}; {cls.cure}")
        (ours,) = get_args(cls.model_fields[cls.version_field].annotation)
        if version != ours:
            raise PlanError(
                f"{where}: is of {cls.version_field} {version!r}, this release reads {ours};"
                f" use one release of batchllm-operator everywhere, or {cls.cure}"
            )
        try:
            return cls.model_validate(cls.opened(fields, where))
        except ValidationError as error:
            reason = f"this release refuses it ({describe(error, cls)})"
            raise DamagedFileError(f"{where}: {reason}; {cls.cure}") from error

    @classmethod
    def opened(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """The model's fields in those of the file, in which a subclass may have a checksum."""
        return fields

    def to_bytes(self) -> bytes:
        """The stored form."""
        return self.model_dump_json(indent=1).encode()
