"""The planner: which datum goes to which rank and micro-batch, decided from lengths alone.

Invariants of a plan: every datum is in exactly one micro-batch; every rank has the same number of micro-batches (some
may be empty); rows * longest row of a micro-batch is within the token budget unless it is one datum longer than that.
The plan is a pure function of (lengths, ranks, token_budget): no clock, no load, no neighbour can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput

OVERHEAD_SHARE = 32
"""A further micro-batch per rank must save more than 1/32 of the budget in padded tokens: what starting one costs."""

PATIENCE = 2
"""Stop looking for less padding after this many further micro-batches per rank that did not pay."""


@dataclass(frozen=True)
class Plan:
    """Where each datum of one command runs.

    ranks: [ranks][micro_batches] -> indices of datums; an empty tuple is a micro-batch without datums.
    computed_tokens: tokens computed, padding included (sum of rows * longest over micro-batches).
    tokens: tokens of the data themselves.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    computed_tokens: int
    tokens: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @property
    def datums(self) -> int:
        """Datums of the batch."""
        return sum(len(batch) for rank in self.ranks for batch in rank)

    def scalars(self) -> dict[str, float]:
        """The plan's columns for the metric catalogue: tokens_computed, padding_tokens, micro_batches."""
        return {
            "tokens_computed": float(self.computed_tokens),
            "padding_tokens": float(self.computed_tokens - self.tokens),
            "micro_batches": float(self.micro_batches),
        }


def plan_batch(lengths: Sequence[int], ranks: int, token_budget: int) -> Plan:
    """The plan of a batch of `lengths` [datums] (tokens) over `ranks`, `token_budget` padded tokens a micro-batch.

    Datums are sorted by length and cut into runs, so that neighbours in a micro-batch are of similar length. All ranks
    run their i-th micro-batches together, so the cost to keep low is the sum over rounds of the longest one. A datum
    longer than the budget gets a micro-batch of its own.

    Raises InvalidInput for an empty batch, ranks or budget below 1; InvalidDatum for a length below 1.
    """
    _check(lengths, ranks, token_budget)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    ordered = [lengths[index] for index in order]
    rounds = _best_rounds(ordered, ranks, token_budget)
    dealt = _deal(rounds, ranks)
    return Plan(
        ranks=tuple(tuple(tuple(order[run.start : run.stop]) for run in rank) for rank in dealt),
        computed_tokens=sum(run.cost for one_round in rounds for run in one_round),
        tokens=sum(lengths),
    )


@dataclass(frozen=True)
class _Run:
    """Datums start..stop-1 of the sorted batch in one micro-batch, `cost` padded tokens."""

    start: int
    stop: int
    cost: int


_EMPTY = _Run(0, 0, 0)


def _check(lengths: Sequence[int], ranks: int, token_budget: int) -> None:
    if not lengths:
        raise InvalidInput("the batch has no datum.", remedy="Send at least one datum.", field="lengths")
    if ranks < 1 or token_budget < 1:
        raise InvalidInput(
            f"a plan needs at least 1 rank and a budget of at least 1 token (got {ranks} and {token_budget}).",
            remedy="Set both to positive numbers.",
            field="ranks" if ranks < 1 else "token_budget",
        )
    for index, length in enumerate(lengths):
        if length < 1:
            raise InvalidDatum(
                f"its length is {length}.", remedy="Send at least one token per datum.", datum=index, field="lengths"
            )


def _cut(ordered: Sequence[int], cap: int) -> list[_Run]:
    """Fewest runs of the descending lengths with rows * longest <= cap; a longer datum is a run of its own."""
    runs = []
    start = 0
    while start < len(ordered):
        rows = min(max(1, cap // ordered[start]), len(ordered) - start)
        runs.append(_Run(start, start + rows, rows * ordered[start]))
        start += rows
    return runs


def _fits(ordered: Sequence[int], cap: int, runs: int) -> bool:
    """Whether `_cut` at this cap yields at most that many runs."""
    start = 0
    while start < len(ordered):
        if not runs:
            return False
        start += cap // ordered[start] or 1
        runs -= 1
    return True


def _best_rounds(ordered: Sequence[int], ranks: int, token_budget: int) -> list[list[_Run]]:
    """Rounds of `ranks` runs, longest first: as many as pay for themselves in padding saved.

    For each number of rounds the batch is cut with about the smallest cap that needs no more runs than there are
    places, so runs are of about equal cost.
    """
    most = -(-len(ordered) // ranks)
    count = -(-len(_cut(ordered, token_budget)) // ranks)
    best: list[list[_Run]] = []
    patience, cap = PATIENCE, token_budget
    while not best or (patience and count <= most):
        cap = _smallest_cap(ordered, cap, ranks * count)
        rounds = _rounds(_cut(ordered, cap), ranks, count)
        if best and _cost(rounds, token_budget) >= _cost(best, token_budget):
            patience -= 1
        else:
            best, patience = rounds, PATIENCE
        count += 1
    return best


def _smallest_cap(ordered: Sequence[int], high: int, runs: int) -> int:
    """A cap within 1/64 of the smallest that cuts into at most `runs`; `high` is one that does."""
    low = 1
    while high - low > high // 64:
        middle = (low + high) // 2
        if _fits(ordered, middle, runs):
            high = middle
        else:
            low = middle + 1
    return high if high == low or not _fits(ordered, low, runs) else low


def _rounds(runs: Sequence[_Run], ranks: int, count: int) -> list[list[_Run]]:
    padded = sorted(runs, key=lambda run: (-run.cost, run.start)) + [_EMPTY] * (ranks * count - len(runs))
    return [padded[first : first + ranks] for first in range(0, len(padded), ranks)]


def _cost(rounds: Sequence[Sequence[_Run]], token_budget: int) -> float:
    """Padded tokens on the way of the slowest rank of each round, and the overhead of each round."""
    return sum(one_round[0].cost for one_round in rounds) + len(rounds) * token_budget / OVERHEAD_SHARE


def _deal(rounds: Sequence[Sequence[_Run]], ranks: int) -> list[list[_Run]]:
    """Each round's longest run to the rank with the least so far; so ranks differ by one micro-batch at most."""
    dealt: list[list[_Run]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for one_round in rounds:
        for run, rank in zip(one_round, sorted(range(ranks), key=lambda rank: (loads[rank], rank)), strict=True):
            dealt[rank].append(run)
            loads[rank] += run.cost
    return dealt
