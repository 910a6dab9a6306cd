"""The section of a spec that says what must hold of the answers before they are published."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from batchllm_operator.spec.addresses import TableAddress
from batchllm_operator.spec.fields import Neutral, NonEmpty, Section, by_name
from batchllm_operator.spec.limits import shown


class Bounds(Section):
    """The least and the most that a number may be."""

    min: Neutral[float | None] = None
    """The least; unset: any."""
    max: Neutral[float | None] = None
    """The most; unset: any."""

    def _faults(self) -> Iterator[str]:
        if self.min is None and self.max is None:
            yield "needs min, max or both"
        elif self.min is not None and self.max is not None and self.min > self.max:
            yield "min is above max"


OnUnmet = Literal["fail", "quarantine", "branch"]
UNMET: Final = "unmet"
"""The column of a quarantine table that says what a row doesn't meet."""
ByName = Annotated[dict[NonEmpty, Bounds], AfterValidator(by_name)]
_QUANTILE: Final = re.compile(r"p(100|[0-9]{1,2}(\.[0-9]{1,6})?)")


def _check_quantiles(values: dict[str, Bounds]) -> dict[str, Bounds]:
    for name in values:
        if not _QUANTILE.fullmatch(name):
            raise ValueError(f"{shown(name)} is no quantile; write p50, p99.9 or such")
    return by_name(values)


class Expectation(Section):
    """What must hold of a column of the output: bounds are `{min: ..., max: ...}`, or one of them;
    shares are from 0 to 1."""

    missing: Neutral[Bounds | None] = None
    """Share of answers that lack a value here, where null is one of the answers' types."""
    empty: Neutral[Bounds | None] = None
    """Share of texts that are empty or white space."""
    duplicate: Neutral[Bounds | None] = None
    """Share of texts that repeat another row's; estimated where more than 4 million differ."""
    values: Neutral[ByName] = Field(default_factory=dict)
    """Share of each value: of a label, a choice, a whole number, `"true"`."""
    drift: Neutral[Bounds | None] = None
    """How far the shares of all values have moved since the partition before that the job has
    published: half the sum of the differences, from 0 to 1."""
    matches: Neutral[ByName] = Field(default_factory=dict)
    """Share of texts in which a regular expression (RE2) is found."""
    range: Neutral[Bounds | None] = None
    """Where all numbers lie."""
    quantiles: Neutral[Annotated[dict[str, Bounds], AfterValidator(_check_quantiles)]] = Field(
        default_factory=dict
    )
    """Quantiles such as `p50` and `p99`: of whole numbers, or of texts' lengths in characters."""

    @property
    def bounds(self) -> dict[str, Bounds]:
        """All bounds by their path, such as `values.spam`; those of a range one by one."""
        found: dict[str, Bounds] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Bounds) and name == "range":
                ends = {n: bound for n, bound in value if bound is not None}
                found |= {f"range.{n}": Bounds(**{n: bound}) for n, bound in ends.items()}
            elif isinstance(value, Bounds):
                found[name] = value
            elif value is not None:
                found |= {f"{name}.{key}": bounds for key, bounds in value.items()}
        return found

    def rowless(self, *, is_status: bool) -> Iterator[str]:
        """Paths of the bounds that no row breaks by itself, so that none can be quarantined.

        A bound names rows if it is one number: those that are so, if they may be so many at most,
        and those that aren't, if they must be so many at least. Shares of values, but those of a
        `status`, do so only if no row may have the value, or each must.
        """
        for name, bounds in self.bounds.items():
            is_one = bounds.min is None or bounds.max is None
            if name.startswith("values.") and not is_status:
                is_one = (bounds.min, bounds.max) in ((None, 0), (1, None))
            if not is_one or name.partition(".")[0] in ("duplicate", "drift", "quantiles"):
                yield name

    def _faults(self) -> Iterator[str]:
        for name, bounds in self.bounds.items():
            is_share = not name.startswith(("range.", "quantiles."))
            if is_share and not all(0 <= b <= 1 for _, b in bounds if b is not None):
                yield f"{shown(name)}: a share is from 0 to 1"
        if not self.bounds:
            yield "expects nothing"


def unmet_faults(
    on_unmet: OnUnmet,
    expect: Mapping[str, Expectation],
    output: TableAddress,
    columns: Collection[str],
    statuses: Collection[str],
) -> Iterator[str]:
    """What keeps a job from `on_unmet`; `columns` are those of its output."""
    if on_unmet == "branch" and output.format != "iceberg":
        yield "on_unmet: only Iceberg tables have branches; write fail or quarantine"
    if on_unmet != "quarantine":
        return
    if UNMET in columns:
        yield f"on_unmet: the quarantine table has a column {UNMET} of its own; rename the output's"
    for column, expected in expect.items():
        for what in expected.rowless(is_status=column in statuses):
            yield (
                f"expect.{shown(column)}.{shown(what)}: no row breaks it by itself, so none can be"
                " quarantined; leave it out, or write on_unmet: fail"
            )
