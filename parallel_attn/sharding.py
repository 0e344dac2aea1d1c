"""Who holds what: heads on ranks (HeadPlan) and slices of parameters on ranks (ParameterShard).

Pure arithmetic. Nothing here needs a process group, so a planner can ask about a thousand ranks on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from parallel_attn.errors import SettingsError

Range = tuple[int, int]
"""Half-open interval (start, stop)."""


def split_evenly(total: int, parts: int, *, what: str = "length", offset: int = 0) -> tuple[Range, ...]:
    """Contiguous ranges covering `total`, whose lengths differ by at most one (the first ones are longer).

    Raises SettingsError when a part would be empty: `what` names the setting.
    """
    if parts < 1:
        raise SettingsError(f"{what}: cannot split {total} into {parts} parts")
    if total < parts:
        raise SettingsError(f"{what}={total} is less than parallel.tensor={parts}: use at most {total} tensor ranks")
    base, longer = divmod(total, parts)
    ranges, start = [], offset
    for part in range(parts):
        stop = start + base + (part < longer)
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


def scale_ranges(ranges: Iterable[Range], factor: int) -> tuple[Range, ...]:
    """Ranges over heads -> ranges over the rows of a weight, `factor` rows per head."""
    return tuple((start * factor, stop * factor) for start, stop in ranges)


@dataclass(frozen=True)
class HeadPlan:
    """Query heads and KV heads -> ranks of the tensor axis.

    A rank holds either whole groups (a group = the query heads that share one KV head) or a part of one group, so its
    local attention is always an ordinary grouped-query attention.

    - `num_kv_heads >= degree`: whole groups, counts differ by at most one group.
    - `num_kv_heads < degree`: every KV head is held by a contiguous run of ranks that split its query heads.

    Raises SettingsError when the heads are not a multiple of the KV heads, or the degree exceeds the query heads.
    """

    num_heads: int
    num_kv_heads: int
    degree: int
    kv_key: str = "num_kv_heads"
    """Key `attention.<kv_key>` that sets `num_kv_heads`, for messages."""
    kv_name: str = "KV head"
    """What a type shares among its query heads, for the table."""

    def __post_init__(self) -> None:
        heads, kv_heads, degree = self.num_heads, self.num_kv_heads, self.degree
        if heads < 1:
            raise SettingsError(f"attention.num_heads={heads} must be at least 1")
        if kv_heads < 1 or heads % kv_heads:
            divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
            raise SettingsError(
                f"attention.{self.kv_key}={kv_heads} does not divide attention.num_heads={heads}: use one of {divisors}"
            )
        if not 1 <= degree <= heads:
            raise SettingsError(
                f"parallel.tensor={degree} exceeds attention.num_heads={heads}: a rank needs a query head, "
                f"use 1 to {heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def kv_heads(self) -> tuple[Range, ...]:
        """KV heads of each rank, as ranges; ranks of one run have the same range."""
        if self.num_kv_heads >= self.degree:
            return split_evenly(self.num_kv_heads, self.degree)
        runs = split_evenly(self.degree, self.num_kv_heads)
        return tuple((head, head + 1) for head, (start, stop) in enumerate(runs) for _ in range(start, stop))

    @cached_property
    def query_heads(self) -> tuple[Range, ...]:
        """Query heads of each rank, as ranges."""
        group = self.group_size
        if self.num_kv_heads >= self.degree:
            return scale_ranges(self.kv_heads, group)
        ranges: list[Range] = []
        for head, (start, stop) in enumerate(split_evenly(self.degree, self.num_kv_heads)):
            ranges += split_evenly(group, stop - start, offset=head * group)
        return tuple(ranges)

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same KV heads as `rank`, itself among them."""
        mine = self.kv_heads[rank]
        return tuple(other for other, theirs in enumerate(self.kv_heads) if theirs == mine)

    def owns_kv(self, rank: int) -> bool:
        """Whether `rank` is the first holder of its KV heads: the one that counts in sums over the tensor axis."""
        return self.holders(rank)[0] == rank

    @property
    def imbalance(self) -> float:
        """Query heads of the fullest rank / mean over ranks: what the slowest rank costs. 1.0 is perfect."""
        return max(stop - start for start, stop in self.query_heads) * self.degree / self.num_heads

    def table(self, **columns: list[str]) -> str:
        """Rank -> query heads, KV heads, copies, and further columns (a cell for each rank), under a title line."""
        header = ("rank", "query heads", f"{self.kv_name}s", f"copies of its {self.kv_name}s", *columns)
        rows = [
            (
                str(rank),
                _show(self.query_heads[rank]),
                _show(self.kv_heads[rank]),
                str(len(self.holders(rank))),
                *(cells[rank] for cells in columns.values()),
            )
            for rank in range(self.degree)
        ]
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [header, *rows]]
        title = (
            f"{self.num_heads} query head{'s' * (self.num_heads > 1)}, {self.num_kv_heads} {self.kv_name}"
            f"{'s' * (self.num_kv_heads > 1)} on {self.degree} "
            f"rank{'s' if self.degree > 1 else ''}: imbalance {self.imbalance:.2f}"
        )
        return "\n".join([title, *lines])

    def __str__(self) -> str:
        return self.table()


def _show(heads: Range) -> str:
    start, stop = heads
    return f"{start}" if stop - start == 1 else f"{start}-{stop - 1} ({stop - start})"


@dataclass(frozen=True)
class ParameterShard:
    """How one parameter is sharded over the tensor axis: the only place that knows.

    full_shape: shape of the full tensor, as one process would hold it
    dim:        the dim that is split, None when every rank holds the whole tensor
    ranges:     the slice of `dim` that each tensor rank holds; equal ranges are copies (empty when dim is None)
    rank, degree: this rank's place on the tensor axis
    decay:      whether weight decay applies (matrices; not gains and biases)
    """

    full_shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Range, ...]
    rank: int
    degree: int
    decay: bool = True

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        size = self.full_shape[self.dim]
        if len(self.ranges) != self.degree:
            raise ValueError(f"{len(self.ranges)} ranges for degree {self.degree}")
        position = 0
        for start, stop in dict.fromkeys(self.ranges):
            if start != position or stop <= start:
                raise ValueError(f"ranges {self.ranges} do not cover 0..{size} without gap or overlap")
            position = stop
        if position != size:
            raise ValueError(f"ranges {self.ranges} do not cover 0..{size}")

    @classmethod
    def replicated(cls, full_shape: Iterable[int], rank: int, degree: int, *, decay: bool = False) -> ParameterShard:
        return cls(tuple(full_shape), None, (), rank, degree, decay)

    def range_of(self, rank: int) -> Range | None:
        return None if self.dim is None else self.ranges[rank]

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Shape that tensor rank `rank` (default: this one) holds."""
        if self.dim is None:
            return self.full_shape
        start, stop = self.ranges[self.rank if rank is None else rank]
        return (*self.full_shape[: self.dim], stop - start, *self.full_shape[self.dim + 1 :])

    def index(self, rank: int | None = None) -> tuple[slice, ...]:
        """Index that cuts the local shard out of the full tensor."""
        if self.dim is None:
            return ()
        start, stop = self.ranges[self.rank if rank is None else rank]
        return (*(slice(None) for _ in range(self.dim)), slice(start, stop))

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Tensor ranks that hold this rank's slice (copies), ascending; a single one when nobody else does."""
        if self.dim is None:
            return tuple(range(self.degree))
        return tuple(rank for rank in range(self.degree) if self.ranges[rank] == self.ranges[self.rank])

    @property
    def first_holder(self) -> bool:
        """Whether this rank is the one whose copy counts (norms, checkpoints, exports)."""
        return self.holders[0] == self.rank

    @property
    def writers(self) -> tuple[int, ...]:
        """Tensor ranks whose slices together are the full tensor, each slice once."""
        if self.dim is None:
            return (0,)
        seen: dict[Range, int] = {}
        for rank, piece in enumerate(self.ranges):
            seen.setdefault(piece, rank)
        return tuple(seen.values())

    def full_elements(self) -> int:
        count = 1
        for size in self.full_shape:
            count *= size
        return count
