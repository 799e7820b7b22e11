"""Download the blocks of remote datasets before training reads them, in the order of its samples.

    batch b is read   ->   blocks of batches b, b + 1, .. are requested by THREADS threads, until
                           WINDOW blocks or BATCHES batches are ahead; b waits for its own

Blocks that are in the cache are not requested. A block that is removed from the cache before it is
read is downloaded by the read, which is slower and not wrong; the cache holds at least 64 blocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from coatlm.data.block_cache import RemoteFile

THREADS = 8
WINDOW = 64  # blocks
BATCHES = 64

FileBlock = tuple[RemoteFile, int]


def rank_samples(
    first_sample: int, *, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[range]:
    """The samples of each of this rank's microbatches of the batch that begins at `first_sample`.

    Row j of microbatch k is sample first_sample + k * (micro_batch * dp_size)
    + dp_rank * micro_batch + j.
    """
    at_once = micro_batch * dp_size
    if global_batch % at_once:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of micro_batch*dp_size={at_once}"
        )
    begin = first_sample + dp_rank * micro_batch
    return [range(at, at + micro_batch) for at in range(begin, begin + global_batch, at_once)]


class ReadAhead:
    """Requests the blocks of a rank's samples; `missing(sample)` are those that it would download.

    `share` are the arguments of `rank_samples`.
    """

    def __init__(self, missing: Callable[[int], Iterable[FileBlock]], **share: int) -> None:
        self._missing, self._share = missing, share
        self._batches: deque[tuple[int, list[FileBlock]]] = deque()  # by first sample
        self._requests: dict[FileBlock, Future[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blocks")

    def wait_for(self, first: int) -> None:
        """Wait for the blocks of the batch that begins at `first`, and request later ones.

        Raises RemoteError or DatasetError.
        """
        while self._batches and self._batches[0][0] < first:
            for block in self._batches.popleft()[1]:
                self._requests.pop(block, None)
        following = self._batches[-1][0] + self._share["global_batch"] if self._batches else first
        while len(self._batches) < 2 or (
            len(self._requests) < WINDOW and len(self._batches) < BATCHES
        ):
            self._request(following)
            following += self._share["global_batch"]
        for block in self._batches[0][1]:
            self._requests[block].result()

    def close(self) -> None:
        """Stop; downloads that have begun end first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _request(self, first: int) -> None:
        blocks = []
        for sample in itertools.chain(*rank_samples(first, **self._share)):
            for block in self._missing(sample):
                if block not in self._requests:
                    file, number = block
                    self._requests[block] = self._threads.submit(file.load, number)
                    blocks.append(block)
        self._batches.append((first, blocks))
