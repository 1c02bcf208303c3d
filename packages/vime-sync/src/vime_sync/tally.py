"""Adding up what landed and what was published, tensor by tensor, and comparing the two.

An update of a large model has hundreds of slices, and this happens while the engine is paused. So the indexes are
worked out once a connection, and an update only adds arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vime_sync.agree import Share
from vime_sync.digest import Digest, Sums
from vime_sync.errors import DigestError
from vime_sync.plan import Plan


class Tally:
    """The sums of one worker's share."""

    def __init__(self, plan: Plan, pieces: Mapping[str, Sequence[tuple[int, int]]], share: Share) -> None:
        """Work out which digest counts for which tensor.

        Args:
            plan: The worker's plan.
            pieces: For each checkpoint tensor the (rank, index) of its published digests.
            share: What this worker vouches for.
        """
        self._names = share.verified
        place = {name: index for index, name in enumerate(share.verified)}
        counted = [i for i, copy in enumerate(plan.copies) if i not in share.skipped and copy.tensor in place]
        self._copies = np.array(counted, dtype=np.intp)
        self._tensors = np.array([place[plan.copies[i].tensor] for i in counted], dtype=np.intp)
        found: dict[int, list[tuple[int, int]]] = {}
        for name in share.verified:
            for rank, index in pieces[name]:
                found.setdefault(rank, []).append((index, place[name]))
        self._published = {rank: np.array(pairs, dtype=np.intp).T for rank, pairs in found.items()}

    def landed(self, sums: Sums) -> Sums:
        """What this worker counted.

        Args:
            sums: uint64 [copies, 2], as the copy program gave them.

        Returns:
            uint64 [verified tensors, 2].
        """
        totals: Sums = np.zeros((len(self._names), 2), dtype=np.uint64)
        np.add.at(totals, self._tensors, sums[self._copies])
        return totals

    def expected(self, published: Mapping[int, Sums]) -> Sums:
        """What the trainer's ranks published.

        Args:
            published: Each rank's digests, uint64 [pieces, 2].

        Returns:
            uint64 [verified tensors, 2].
        """
        totals: Sums = np.zeros((len(self._names), 2), dtype=np.uint64)
        for rank, (indexes, tensors) in self._published.items():
            np.add.at(totals, tensors, published[rank][indexes])
        return totals

    def compare(self, landed: Sums, expected: Sums) -> None:
        """Fail if a tensor is not what was published; for a worker that vouches for all of them alone.

        Raises:
            DigestError: Naming the first such tensor.
        """
        wrong = np.flatnonzero((landed != expected).any(axis=1)).tolist()
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise DigestError(
                "bytes that arrived are not those that were published",
                where=f"tensor {self._names[wrong[0]]}{more}",
                seen=str(Digest.total(landed[wrong[:1]])),
                expected=str(Digest.total(expected[wrong[:1]])),
            )
