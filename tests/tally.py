"""Waiting for other ranks in memory that all of them share: it outlives whoever is killed."""

import mmap
import time


class Tally:
    """How often each rank has come to a place. Made before the ranks are forked."""

    def __init__(self):
        self._times = mmap.mmap(-1, mmap.PAGESIZE)

    def note(self, rank):
        """This rank has come there, once more."""
        self._times[rank] += 1

    def wait_for(self, total):
        """Wait until the ranks have come there so many times together.

        Who is to be killed waits so until the others are through with what comes before: a rank that is
        through with an operation may be missed in it by another one that is not.
        """
        end = time.monotonic() + 30
        while sum(self._times[:]) < total:
            assert time.monotonic() < end, f"{list(self._times[:8])} instead of {total} together"
            time.sleep(0.001)
