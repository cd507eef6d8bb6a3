"""The book of a common corpus: every block is committed at most once an epoch, and none is lost.

    free -> lent(site) -> committed        with the commit that used the update
                       -> free             when the update did not count, or for the part that was not trained on

Spans (`umbel.data.leases`) that come back are lent again first, in order; then the epoch goes on; the next begins when
nothing of it is free, so a lease may end in one epoch and go on in the next. Nothing is lent when a checkpoint is
written, so a book read back from it never has to guess what became of a lease. The state is plain data and travels in
the checkpoint of the round that used the updates.

    invariant, at any moment and for every epoch begun:
    committed + lent + free spans = [0, num_blocks), without overlap
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umbel.data.leases import Span
from umbel.errors import UmbelError


class LeaseError(UmbelError):
    """A book does not fit the corpus it is asked about."""


class LeaseTable:
    """Lends spans to sites; a site holds at most one lease."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.epoch = 0
        self.free: list[Span] = []
        self.lent: dict[str, list[Span]] = {}
        # Per epoch, spans committed, joined where they touch.
        self.committed: dict[int, list[tuple[int, int]]] = {}
        self.blocks_committed = 0
        self.blocks_returned = 0

    def lend(self, site: str, count: int, num_blocks: int) -> list[Span]:
        """Return spans of `count` blocks; what the site still held comes back first."""
        self._fit(num_blocks)
        self.give_back(site)
        found: list[Span] = []
        while count > 0 and num_blocks > 0:
            if not self.free:
                self._next_epoch()
            epoch, first, last = self.free.pop(0)
            taken = min(count, last - first)
            found.append((epoch, first, first + taken))
            if first + taken < last:
                self.free.insert(0, (epoch, first + taken, last))
            count -= taken
        self.lent[site] = found
        return list(found)

    def commit(self, site: str, used: int) -> tuple[int, int]:
        """Enter the first `used` blocks of a site's lease as trained on; return (committed, returned)."""
        left, rest = used, []
        for epoch, first, last in self.lent.pop(site, []):
            taken = min(left, last - first)
            if taken:
                self._enter(epoch, first, first + taken)
            if first + taken < last:
                rest.append((epoch, first + taken, last))
            left -= taken
        if left > 0:
            raise LeaseError(f"site {site!r} claims {left} blocks more than it was lent")
        self._free(rest)
        returned = sum(last - first for _, first, last in rest)
        self.blocks_committed += used
        self.blocks_returned += returned
        return used, returned

    def give_back(self, site: str) -> int:
        """Return a site's lease to the free ones; returns the number of blocks."""
        spans = self.lent.pop(site, [])
        self._free(spans)
        count = sum(last - first for _, first, last in spans)
        self.blocks_returned += count
        return count

    def summary(self) -> dict[str, int]:
        """Return the totals a round's record shows."""
        return {"epoch": self.epoch, "committed": self.blocks_committed, "returned": self.blocks_returned}

    def state(self) -> dict[str, Any]:
        """Return the book as plain data; leases that are out count as free, for no later life can settle them."""
        return {
            "num_blocks": self.num_blocks,
            "epoch": self.epoch,
            "free": [
                list(s) for s in _joined([*self.free, *(s for held in self.lent.values() for s in held)])
            ],
            "committed": {str(e): [list(s) for s in spans] for e, spans in self.committed.items()},
            "blocks_committed": self.blocks_committed,
            "blocks_returned": self.blocks_returned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.num_blocks, self.epoch = int(state["num_blocks"]), int(state["epoch"])
        self.free = [(int(e), int(a), int(b)) for e, a, b in state["free"]]
        self.lent = {}
        self.committed = {int(e): [(int(a), int(b)) for a, b in s] for e, s in state["committed"].items()}
        self.blocks_committed = int(state["blocks_committed"])
        self.blocks_returned = int(state["blocks_returned"])

    def check(self) -> None:
        """Raise LeaseError unless every epoch begun is covered once and only once."""
        every = [*self.free, *(s for held in self.lent.values() for s in held)]
        for epoch in range(self.epoch + 1 if self.num_blocks else 0):
            spans = [(a, b) for e, a, b in every if e == epoch] + self.committed.get(epoch, [])
            at = 0
            for first, last in sorted(spans):
                if first != at:
                    raise LeaseError(f"epoch {epoch}: block {min(first, at)} is lost or counted twice")
                at = last
            if at != self.num_blocks:
                raise LeaseError(f"epoch {epoch}: blocks from {at} on are lost")

    def _fit(self, num_blocks: int) -> None:
        if self.num_blocks == 0:
            self.num_blocks = num_blocks
            self.free = [(0, 0, num_blocks)] if num_blocks else []
        if num_blocks != self.num_blocks:
            raise LeaseError(f"the corpus has {num_blocks} training blocks, the book {self.num_blocks}")

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.free = [(self.epoch, 0, self.num_blocks)] if self.num_blocks else []

    def _free(self, spans: Sequence[Span]) -> None:
        self.free = _joined([*self.free, *spans])

    def _enter(self, epoch: int, first: int, last: int) -> None:
        spans = _joined([(epoch, a, b) for a, b in [*self.committed.get(epoch, []), (first, last)]])
        self.committed[epoch] = [(a, b) for _, a, b in spans]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, neighbours as one."""
    found: list[Span] = []
    for epoch, first, last in sorted(spans):
        if found and found[-1][0] == epoch and found[-1][2] == first:
            found[-1] = (epoch, found[-1][1], last)
        elif first < last:
            found.append((epoch, first, last))
    return found


def settle(table: LeaseTable, opened: Any, train: Any, *, committed: bool) -> None:
    """Enter what a round's commit used, and take everything else back: to be called once, at the round's end.

    A step uses `batch-size x accumulation` blocks, in the order of the lease; a site that claims more than its lease
    is believed up to its end.
    """
    used = {}
    if committed:
        size = train.batch_size * train.accumulation
        used = {e.reply.site: e.reply.steps * size for e in opened.spool.ordered() if not e.late}
    for site in sorted(table.lent):
        lent = sum(last - first for _, first, last in table.lent[site])
        table.commit(site, min(used.get(site, 0), lent))
