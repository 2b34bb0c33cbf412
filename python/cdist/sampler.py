"""DistributedSampler: which sample goes to which rank."""

import itertools
import operator
import sys
import warnings

import numpy as np

from cdist import _core

__all__ = ["DistributedSampler"]

# cd_pad of csrc/sampler/index.h
_REPEAT, _DROP, _NONE = 0, 1, 2


class DistributedSampler:
    """Gives each rank its share of a data set's indices, in torch's order for the same seed and epoch.

    A *pass* is what one ``iter(sampler)`` yields. The *stream* is the order of all samples in an epoch; rank
    r of R takes its positions r, r + R, r + 2R, …

    Args:
        dataset: anything with ``len()``, or the length as an int. May be None where ``sampler`` is given.
        num_replicas: number of ranks that share the data; default: ``cdist.get_world_size()``.
        rank: this rank, 0 … num_replicas − 1; default: ``cdist.get_rank()``.
        shuffle: a new permutation for each epoch (default), or the order 0 … N − 1.
        seed: the permutation is that of ``seed + epoch``, modulo 2^32. The same on all ranks.
        drop_last: drop the tail of the stream, so that all ranks get ``N // R`` samples.
        pad: without ``drop_last``, repeat the stream's start, so that all ranks get ``ceil(N / R)`` samples
            (default), or give some ranks one sample less (False): right for evaluation, since each sample
            comes exactly once. Ranks then make different numbers of steps, so no collective belongs inside.
        sampler: any iterable whose items are sharded in place of a permutation: a weighted sampler, a list of
            indices, an endless generator. Every rank must draw the same stream, so seed it the same on every
            rank; ``shuffle`` and ``seed`` are not used. ``set_epoch`` is passed on to it where it has one.

    Raises:
        ValueError: rank outside 0 … num_replicas − 1; num_replicas below 1; negative length; rank or
            num_replicas missing before ``init_process_group``.
        TypeError: a dataset without length; neither dataset nor sampler.

    """

    def __init__(
        self,
        dataset,
        num_replicas=None,
        rank=None,
        shuffle=True,
        seed=0,
        drop_last=False,
        *,
        pad=True,
        sampler=None,
    ):
        if num_replicas is None or rank is None:
            import cdist

            num_replicas = cdist.get_world_size() if num_replicas is None else num_replicas
            rank = cdist.get_rank() if rank is None else rank
        if dataset is None and sampler is None:
            raise TypeError("DistributedSampler needs a dataset (with len(), or an int) or a sampler")
        self.dataset = dataset
        self.sampler = sampler
        self.num_replicas = int(num_replicas)
        self.rank = int(rank)
        self.epoch = 0
        self.drop_last = bool(drop_last)
        self.pad = bool(pad)
        self.shuffle = bool(shuffle)
        self.seed = int(seed)
        self._loaded = 0  # positions of the stream that were used up when load_state_dict was called
        self._pass = None  # the latest pass of this epoch
        self._training = None  # the latest that may have been for training
        self._knows_epochs = False  # set_epoch was called
        self._warned = False
        self._set = {}  # numbers that a subclass with an __iter__ of its own has set
        # Checks rank and num_replicas, and that the data set has a length; that of a stream may be unknown.
        _core.index_count(*self._spec(self._length() if sampler is None else 0))
        self._warn_of_own_numbers()

    def _length(self):
        if self.sampler is not None:
            return len(self.sampler)
        length = len(self.dataset) if hasattr(self.dataset, "__len__") else operator.index(self.dataset)
        if length < 0:
            raise ValueError(f"DistributedSampler: a dataset's length should not be negative, as {length} is")
        return length

    @property
    def _first(self):
        """Where in the stream the next pass begins: after a pass that ran to its end, at the start again."""
        return 0 if self._pass is not None and self._pass.is_done() else self._loaded

    def _spec(self, length, first=0):
        padding = _DROP if self.drop_last else _REPEAT if self.pad else _NONE
        shuffle = self.shuffle and self.sampler is None
        return length, self.seed + self.epoch, first, self.rank, self.num_replicas, shuffle, padding

    @property
    def num_samples(self):
        """Samples of this rank in a whole epoch; a subclass with an order of its own may set it."""
        if "num_samples" in self._set:
            return self._set["num_samples"]
        return _core.index_count(*self._spec(self._length()))[0]

    @num_samples.setter
    def num_samples(self, value):
        self._set["num_samples"] = value

    @property
    def total_size(self):
        """Samples of all ranks in a whole epoch, padding included; a subclass may set it."""
        if "total_size" in self._set:
            return self._set["total_size"]
        return self.num_samples * self.num_replicas if self.pad or self.drop_last else self._length()

    @total_size.setter
    def total_size(self, value):
        self._set["total_size"] = value

    def __len__(self):
        """Count what the next pass yields: ``num_samples``, or what was left at ``load_state_dict``."""
        if "num_samples" in self._set:
            return self._set["num_samples"]
        return _core.index_count(*self._spec(self._length(), self._first))[0]

    def __iter__(self):
        self._warn_of_same_order()
        first = self._first
        if self.sampler is None:
            iterator = _core.IndexIterator(self.indices())
        else:
            iterator = _StreamIterator(self._share(first))
        self._loaded = first
        self._pass = _Pass(iterator, first)
        if _may_train():
            self._training = self._pass
        return iterator

    def indices(self):
        """Return the indices of the next pass, a new int64 array of shape ``(len(self),)``."""
        first = self._first
        if self.sampler is not None:
            return np.fromiter(self._share(first), np.int64)
        spec = self._spec(self._length(), first)
        out = np.empty(_core.index_count(*spec)[0], np.int64)
        _core.index_fill(*spec, 0, out)
        return out

    def _share(self, first):
        """Yield the items of this rank out of the stream, whose length need not be known."""
        stream = iter(self.sampler)
        start = list(itertools.islice(stream, self.num_replicas))
        stream = itertools.islice(itertools.chain(start, stream), first, None)
        while True:
            turn = list(itertools.islice(stream, self.num_replicas))
            if len(turn) < self.num_replicas:
                break
            yield turn[self.rank]
        if not turn or self.drop_last:
            return
        if self.rank < len(turn):
            yield turn[self.rank]
        elif self.pad:
            yield start[(self.rank - len(turn)) % len(start)]

    def is_padding(self):
        """Tell which entries of ``indices()`` are padding: a bool array of shape ``(len(self),)``."""
        count, padding = _core.index_count(*self._spec(self._length(), self._first))
        mask = np.zeros(count, bool)
        mask[count - padding :] = True
        return mask

    def set_epoch(self, epoch):
        """Choose the permutation of an epoch; call it on all ranks before each epoch's pass.

        Another epoch than the present one also ends the effect of ``load_state_dict``.
        """
        self._knows_epochs = True
        epoch = int(epoch)
        if epoch != self.epoch:
            self._loaded = 0
            self._pass = self._training = None
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self, position=None):
        """How far this epoch is, as a dict of ints: the same on all ranks that are equally far.

        Args:
            position: how many samples of the latest pass this rank has used; default: how many it was given.
                A loader with workers draws ahead of the training: there, pass the number that was trained on.

        """
        first = self._loaded
        if self._pass is not None:
            first = self._pass.first
            position = self._pass.iterator.position if position is None else position
        consumed = first + operator.index(position or 0) * self.num_replicas
        return {"epoch": self.epoch, "seed": self.seed, "world_size": self.num_replicas, "consumed": consumed}

    def load_state_dict(self, state):
        """Make the next pass yield what was left when ``state_dict`` was called.

        The number of ranks may be another one: what is left of the stream is then shared out anew, so that
        over all ranks each sample left comes exactly once (but for padding or dropping at the end).

        Raises:
            KeyError: not a dict of ``state_dict``.
            ValueError: a negative position.

        """
        epoch, seed, consumed = int(state["epoch"]), int(state["seed"]), int(state["consumed"])
        if consumed < 0:
            raise ValueError(f"DistributedSampler: 'consumed' should not be negative, not {consumed}")
        knew = self._knows_epochs
        self.set_epoch(epoch)
        self._knows_epochs = knew  # to resume is not to set each epoch
        self.seed = seed
        self._loaded = consumed
        self._pass = self._training = None

    def _warn_of_own_numbers(self):
        if self.num_replicas > 1 and getattr(self.sampler, "generator", self) is None:
            warnings.warn(
                f"DistributedSampler: {type(self.sampler).__name__} without a generator draws from torch's "
                "global random numbers; unless these are the same on all ranks, some samples come twice and "
                "others not at all: give it generator=torch.Generator().manual_seed(seed)",
                UserWarning,
                stacklevel=3,
            )

    def _warn_of_same_order(self):
        """Where nothing was told of epochs; an evaluation, and who sets them, may go over one twice."""
        last = self._training
        if last is None or self._warned or self.sampler is not None or not self.shuffle:
            return
        if self._knows_epochs or not _may_train():
            return
        if last.is_done() and last.iterator.count > 0:
            self._warned = True
            warnings.warn(
                "DistributedSampler: this pass has the same order as the last one; call "
                "sampler.set_epoch(epoch) before each epoch",
                UserWarning,
                stacklevel=3,
            )

    def __getstate__(self):
        """Leave the pass behind: a copy starts it anew."""
        return {**self.__dict__, "_pass": None, "_training": None, "_loaded": self._first}


def _may_train():
    """Tell that no gradients are switched off: under torch.no_grad() a pass is an evaluation."""
    torch = sys.modules.get("torch")
    return torch is None or not hasattr(torch, "is_grad_enabled") or torch.is_grad_enabled()


class _Pass:
    """One iteration: its iterator, and where in the stream it began."""

    def __init__(self, iterator, first):
        self.iterator = iterator
        self.first = first

    def is_done(self):
        return self.iterator.position == self.iterator.count


class _StreamIterator:
    """What _core.IndexIterator is for indices: an iterator that counts. `count` is known at the end."""

    def __init__(self, items):
        self._items = items
        self.position = 0
        self.count = None

    def __iter__(self):
        return self

    def __next__(self):
        try:
            item = next(self._items)
        except StopIteration:
            self.count = self.position
            raise
        self.position += 1
        return item
