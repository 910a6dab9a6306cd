"""Searched splits for lengths to be met, and what follows for those between (KVR-P).

A search takes milliseconds to seconds, by the model; measured on the target hardware it takes hours
(Cho et al., App. D). So splits are searched once for some lengths, for one model, GPU, number of
replicas and bandwidth, and boundaries in between are interpolated linearly, as shares of the prefix
(Sec. 4.2). Below the least length and above the greatest, the shares are theirs.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.runahead.chain import Chain, Goal, Split
from batchllm_operator.planner.runahead.search import search_split, split_at

SPLIT_TABLE_VERSION: Final = 1
_MOST_TIMES_OFF: Final = 2.0
"""That a table's bandwidth may be above or below what is asked for."""
_Tokens = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(min_length=1)]


class SplitTable(BaseModel):
    """Splits by prefix length; a table is for one subject and of use for no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split_table_version: Literal[1] = 1
    model: _Name
    gpu: _Name
    num_replicas: Annotated[int, Field(ge=1)]
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Of each hop."""
    block_size: _Tokens
    max_step_tokens: _Tokens | None = None
    """Tokens that a chunk may have; None: any number."""
    until: Goal = "first_token"
    """What the splits are to reach soon."""
    splits: tuple[tuple[_Tokens, ...], ...] = Field(min_length=1)
    """Chunks of each prefix, in ascending order of their sums."""

    @model_validator(mode="after")
    def _check(self) -> SplitTable:
        if self.max_step_tokens is not None and self.max_step_tokens < self.block_size:
            raise ValueError("max_step_tokens is less than a block")
        lengths = self.lengths
        if list(lengths) != sorted(set(lengths)):
            raise ValueError("splits aren't in ascending order of their sums")
        for split in self.splits:
            if len(split) != self.num_replicas:
                raise ValueError(f"the split {split} isn't for {self.num_replicas} replicas")
            if any(chunk % self.block_size for chunk in split[:-1]):
                raise ValueError(f"the split {split} isn't of whole blocks")
            if self.max_step_tokens is not None and max(split) > self.max_step_tokens:
                raise ValueError(f"the split {split} has a chunk that is longer than a step")
        return self

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prefix lengths that were searched, in tokens."""
        return tuple(sum(split) for split in self.splits)

    @classmethod
    def search(
        cls,
        chain: Chain,
        lengths: Iterable[int],
        num_replicas: int,
        *,
        model: str,
        gpu: str,
        until: Goal = "first_token",
    ) -> SplitTable:
        """Search a split for each of some prefix lengths.

        Args:
            chain: what a split is searched for.
            lengths: in tokens, in any order.
            num_replicas: p.
            model: names the model, in the table.
            gpu: names the GPU.
            until: what a split is to reach soon.

        Raises:
            PlanError: there are no lengths, or `search_split` refuses one.
        """
        splits = tuple(
            search_split(chain, each, num_replicas, until) for each in sorted(set(lengths))
        )
        if not splits:
            raise PlanError("table of splits: no lengths are given")
        return cls(
            model=model,
            gpu=gpu,
            num_replicas=num_replicas,
            bytes_per_s=chain.link.bytes_per_s,
            block_size=chain.block_size,
            max_step_tokens=chain.max_step_tokens,
            until=until,
            splits=splits,
        )

    def split(self, num_tokens: int) -> Split:
        """The split of a prefix: the one searched for its length, or interpolated.

        Whole blocks, each replica at least one of them and at most a step, whatever the table says.

        Raises:
            PlanError: the prefix has fewer blocks than there are replicas, or doesn't fit into a
                step of each.
        """
        num_blocks = -(-num_tokens // self.block_size)
        most = num_blocks
        if self.max_step_tokens is not None:
            most = self.max_step_tokens // self.block_size
        if not self.num_replicas <= num_blocks <= most * self.num_replicas:
            raise PlanError(
                f"table of splits: a prefix of {num_tokens} tokens has {num_blocks} blocks of"
                f" {self.block_size}; {self.num_replicas} replicas compute 1 to {most} each"
            )
        found: list[int] = []
        for idx, share in enumerate(self._shares(num_tokens), 1):
            left = self.num_replicas - idx
            before = found[-1] if found else 0
            least = max(before + 1, num_blocks - left * most)
            greatest = min(before + most, num_blocks - left)
            found.append(min(max(round(share * num_tokens / self.block_size), least), greatest))
        return split_at(found, num_tokens, self.block_size)

    def _shares(self, num_tokens: int) -> list[float]:
        """Where each chunk but the last ends, as a share of the prefix."""
        lengths = self.lengths
        after = bisect.bisect_left(lengths, num_tokens)
        if after == 0 or after == len(lengths):
            return _ends(self.splits[min(after, len(lengths) - 1)])
        low, high = lengths[after - 1], lengths[after]
        weight = (num_tokens - low) / (high - low)
        pairs = zip(_ends(self.splits[after - 1]), _ends(self.splits[after]), strict=True)
        return [start + weight * (end - start) for start, end in pairs]

    def save(self, path: Path) -> None:
        """Write the table as JSON: whole, or not at all."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> SplitTable:
        """Read what `save` has written.

        Raises:
            PlanError: the file can't be read, or isn't a table of splits of this version.
        """
        where = f"table of splits {path}"
        try:
            body: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{where}: can't be read: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"{where}: not JSON: {error}") from error
        version = body.get("split_table_version") if isinstance(body, dict) else None
        if version != SPLIT_TABLE_VERSION:
            raise PlanError(
                f"{where}: is of version {version!r}, and this release reads version"
                f" {SPLIT_TABLE_VERSION}; search the table again"
            )
        try:
            return cls.model_validate_json(json.dumps(body), strict=True)
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)[:5]
            said = "; ".join(".".join(map(str, e["loc"])) or e["msg"] for e in faults)
            raise PlanError(f"{where}: is corrupted: see {said}; search it again") from error


def find_table(
    tables: Iterable[SplitTable],
    chain: Chain,
    num_replicas: int,
    *,
    model: str,
    gpu: str,
    until: Goal = "first_token",
) -> SplitTable | None:
    """The table for a chain, if there is one: with the bandwidth nearest to the chain's.

    Args:
        tables: to choose from.
        chain: its block size and longest chunk have to be the table's own.
        num_replicas: p.
        model: as named in the table.
        gpu: as named in the table.
        until: what the splits are to reach soon.

    Returns:
        None if no table is for this, or if all are for a bandwidth that is twice the chain's or
        more, or half of it or less: best splits change with it.
    """
    wanted = (model, gpu, num_replicas, chain.block_size, chain.max_step_tokens, until)
    found = [
        (abs(math.log(table.bytes_per_s / chain.link.bytes_per_s)), table)
        for table in tables
        if wanted
        == (
            table.model,
            table.gpu,
            table.num_replicas,
            table.block_size,
            table.max_step_tokens,
            table.until,
        )
    ]
    ratio, nearest = min(found, key=lambda each: each[0], default=(math.inf, None))
    return nearest if ratio < math.log(_MOST_TIMES_OFF) else None


def _ends(split: Split) -> list[float]:
    ends, num_tokens, total = [], 0, sum(split)
    for chunk in split[:-1]:
        num_tokens += chunk
        ends.append(num_tokens / total)
    return ends
