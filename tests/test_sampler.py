"""DistributedSampler against torch's, and what it does beyond."""

import copy
import pickle
import threading
import warnings
import zlib

import numpy as np
import pytest
from cdist import _core
from cdist.sampler import DistributedSampler

torch_data = pytest.importorskip("torch.utils.data", reason="torch comes with EXTRAS in .ci/run")
torch = pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")

# (n, seed, first entries, crc32 of the int64 array): runs of torch 2.14
VECTORS = [
    (10, 0, [4, 1, 7, 5, 3, 9, 0, 8, 6, 2], 0x7042CF3F),
    (10, 42, [2, 6, 1, 8, 4, 5, 0, 9, 3, 7], 0x7E0FF881),
    (1000, 0, [44, 37, 675, 775, 947, 209, 719, 500, 561, 264], 0x458FA90F),
    (50000, 4294967301, [3411, 1555, 16365, 40130, 23042, 44310, 27300, 23255, 45776, 47857], 0xB07654B6),
    (100003, 7, [31784, 94367, 92227, 75289, 72116, 19382, 52512, 558, 43026, 84144], 0x8CE3FF35),
    (1048576, 123456789, [507576, 736886, 867914, 923771, 143866], 0x438F670B),
    (1281167, 90, [124108, 581490, 799652, 722866, 970714], 0x789FE604),
]


def shards(dataset, replicas, **kw):
    epoch = kw.pop("epoch", 0)
    out = []
    for rank in range(replicas):
        sampler = DistributedSampler(dataset, replicas, rank, **kw)
        sampler.set_epoch(epoch)
        out.append(list(sampler))
    return out


@pytest.mark.parametrize(("n", "seed", "first", "crc"), VECTORS)
def test_permutation_vectors(n, seed, first, crc):
    out = DistributedSampler(n, 1, 0, seed=seed).indices()
    assert out.dtype == np.int64
    assert out[: len(first)].tolist() == first
    assert zlib.crc32(out.tobytes()) == crc


def test_documented_shards():
    assert shards(10, 3) == [[4, 5, 0, 2], [1, 3, 8, 4], [7, 9, 6, 1]]
    assert shards(10, 3, drop_last=True) == [[4, 5, 0], [1, 3, 8], [7, 9, 6]]
    assert shards(10, 3, seed=5, epoch=2) == [[5, 4, 9, 2], [0, 1, 6, 5], [3, 7, 8, 0]]
    assert shards(2, 5) == [[0], [1], [0], [1], [0]]
    assert shards(7, 4, drop_last=True, epoch=1) == [[0], [6], [1], [3]]


def assert_equals_torch(n, replicas, rank, shuffle, drop_last, seed, epochs):
    ours = DistributedSampler(n, replicas, rank, shuffle, seed, drop_last)
    theirs = torch_data.DistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
    assert len(ours) == len(theirs)
    assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)
    for epoch in epochs:
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        expected = list(theirs)
        assert list(ours) == expected
        assert ours.indices().tolist() == expected


@pytest.mark.parametrize("replicas", range(1, 10))
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_small_lengths_equal_torch(replicas, shuffle, drop_last):
    for n in range(51):
        for rank in range(replicas):
            assert_equals_torch(n, replicas, rank, shuffle, drop_last, seed=n, epochs=(0, 3))


@pytest.mark.parametrize(
    ("n", "replicas", "rank", "drop_last", "seed"),
    [(1_000_000, 8, 3, False, 0), (1_000_003, 7, 6, True, 2**32 + 5), (999_999, 2, 1, False, -3)],
)
def test_a_million_equals_torch(n, replicas, rank, drop_last, seed):
    assert_equals_torch(n, replicas, rank, True, drop_last, seed, epochs=(0, 17))


def test_iteration_gives_ints_and_counts():
    sampler = DistributedSampler(list(range(100)), 4, 1)
    iterator = iter(sampler)
    assert type(next(iterator)) is int
    assert iterator.position == 1
    assert iterator.__length_hint__() == 24
    assert len(list(iterator)) == 24
    assert next(iterator, None) is None
    assert next(iterator, None) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_torch_loader_takes_it_unchanged(workers, batch_size):
    data = torch.arange(37) * 10
    seen = []
    for rank in range(3):
        ours = DistributedSampler(data, 3, rank, seed=2)
        theirs = torch_data.DistributedSampler(data, 3, rank, seed=2)
        batches = [
            torch_data.DataLoader(data, batch_size=batch_size, sampler=s, num_workers=workers)
            for s in (ours, theirs)
        ]
        assert len(batches[0]) == len(batches[1])
        got, expected = ([b.flatten().tolist() for b in loader] for loader in batches)
        assert got == expected
        seen += sum(got, [])
    assert set(seen) == set(data.tolist())


@pytest.mark.parametrize(
    ("args", "kw", "error", "text"),
    [
        ((10, 3, 3), {}, ValueError, r"Invalid rank 3, rank should be in the interval \[0, 2\]"),
        ((10, 3, -1), {}, ValueError, r"Invalid rank -1, rank should be in the interval \[0, 2\]"),
        ((10, 0, 0), {}, ValueError, "num_replicas should be at least 1"),
        ((-1, 1, 0), {}, ValueError, "should not be negative"),
        ((1 << 60, 1, 0), {}, ValueError, "2\\^60"),
        ((None, 1, 0), {}, TypeError, "needs a dataset"),
        ((1.5, 1, 0), {}, TypeError, "integer"),
        ((10, 2, "x"), {}, ValueError, "invalid literal"),
    ],
)
def test_bad_arguments(args, kw, error, text):
    with pytest.raises(error, match=text):
        DistributedSampler(*args, **kw)


def test_core_refuses_wrong_buffers():
    spec = (10, 0, 0, 0, 2, True, 0)
    for bad in (np.empty(5, np.int32), np.empty(5, np.float64), np.empty(10, np.int64)[::2]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            _core.index_fill(*spec, 0, bad)
        with pytest.raises((TypeError, ValueError, BufferError)):
            _core.IndexIterator(bad)
    frozen = np.empty(5, np.int64)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _core.index_fill(*spec, 0, frozen)
    with pytest.raises(ValueError, match="but the rank has 5"):
        _core.index_fill(*spec, 1, np.empty(5, np.int64))
    with pytest.raises(ValueError, match="pad should be"):
        _core.index_count(10, 0, 0, 0, 2, True, 3)
    with pytest.raises(TypeError):
        _core.index_fill(*spec)


def test_no_padding_for_evaluation():
    """K157: exact shards for evaluation."""
    parts = shards(10, 3, pad=False)
    assert [len(p) for p in parts] == [4, 3, 3]
    assert sorted(sum(parts, [])) == list(range(10))
    assert [len(DistributedSampler(10, 3, r, pad=False)) for r in range(3)] == [4, 3, 3]
    assert DistributedSampler(10, 3, 0, pad=False).total_size == 10


def test_padding_is_told():
    """K157: which indices are padding."""
    masks = [DistributedSampler(10, 3, r).is_padding() for r in range(3)]
    assert sum(int(m.sum()) for m in masks) == 2
    real = [i for r in range(3) for i in DistributedSampler(10, 3, r).indices()[~masks[r]].tolist()]
    assert sorted(real) == list(range(10))
    for kw in ({"pad": False}, {"drop_last": True}):
        assert not any(DistributedSampler(10, 3, r, **kw).is_padding().any() for r in range(3))


def test_no_sample_is_dropped_for_a_copy():
    """K158: nothing real is dropped in favour of a copy."""
    parts = shards(9, 4)
    kept = [p[: len(p) // 2 * 2] for p in parts]  # a loader with batch 2 and drop_last
    assert len(set(sum(kept, []))) == 8
    assert len(set(sum(shards(9, 4, drop_last=True), []))) == 8


def advance(sampler, count):
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


def test_resume_in_mid_epoch():
    """K160: the rest of an epoch after a restart."""
    whole = DistributedSampler(40, 2, 1, seed=4)
    whole.set_epoch(3)
    expected = list(whole)
    first = DistributedSampler(40, 2, 1, seed=4)
    first.set_epoch(3)
    assert advance(first, 7) == expected[:7]
    state = first.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    again = DistributedSampler(40, 2, 1)
    again.load_state_dict(state)
    again.set_epoch(3)  # as a training loop does
    assert len(again) == 13
    assert again.indices().tolist() == expected[7:]
    assert advance(again, 2) == expected[7:9]
    assert advance(again, 2) == expected[7:9]  # a look ahead does not lose the place
    middle = again.state_dict()
    assert list(again) == expected[7:]
    third = DistributedSampler(40, 2, 1)
    third.load_state_dict(middle)
    assert list(third) == expected[9:]
    again.set_epoch(4)
    whole.set_epoch(4)
    assert list(again) == list(whole)


def test_after_the_rest_come_whole_passes():
    sampler = DistributedSampler(20, 2, 0, shuffle=False)
    sampler.load_state_dict({"epoch": 0, "seed": 0, "consumed": 8})
    assert list(sampler) == list(range(8, 20, 2))
    assert len(sampler) == 10
    assert list(sampler) == list(range(0, 20, 2))
    state = sampler.state_dict()
    sampler.load_state_dict(state)  # of a finished epoch: nothing is left
    assert list(sampler) == []
    assert list(sampler) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("old", "new", "n", "used"),
    [(2, 4, 20, 3), (2, 4, 21, 7), (4, 3, 50, 5), (1, 5, 8, 6), (3, 2, 10, 4), (3, 1, 100, 0)],
)
def test_resume_at_another_world_size(old, new, n, used):
    """K160: the rest of an epoch on more or fewer ranks."""
    olds = [DistributedSampler(n, old, r, seed=1, pad=False) for r in range(old)]
    before = [advance(s, min(used, len(s))) for s in olds]
    state = olds[0].state_dict()
    news = [DistributedSampler(n, new, r, pad=False) for r in range(new)]
    for sampler in news:
        sampler.load_state_dict(state)
    after = [list(s) for s in news]
    assert sorted(sum(before + after, [])) == list(range(n))
    padded = [DistributedSampler(n, new, r) for r in range(new)]
    for sampler in padded:
        sampler.load_state_dict(state)
    assert len({len(s) for s in padded}) == 1
    real = [i for s in padded for i in s.indices()[~s.is_padding()].tolist()]
    assert sorted(sum(before, []) + real) == list(range(n))


def test_state_with_a_position_of_the_trainer():
    sampler = DistributedSampler(100, 2, 0, shuffle=False)
    loader = torch_data.DataLoader(torch.arange(100), batch_size=5, sampler=sampler, num_workers=2)
    batches = iter(loader)
    trained = [next(batches).tolist() for _ in range(3)]
    state = sampler.state_dict(position=15)
    del batches
    rest = DistributedSampler(100, 2, 0, shuffle=False)
    rest.load_state_dict(state)
    assert sum(trained, []) + list(rest) == list(range(0, 100, 2))


def test_bad_states():
    sampler = DistributedSampler(10, 1, 0)
    with pytest.raises(KeyError):
        sampler.load_state_dict({})
    with pytest.raises(ValueError, match="negative"):
        sampler.load_state_dict({"epoch": 0, "seed": 0, "consumed": -1})


@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("kw", [{}, {"pad": False}, {"drop_last": True}])
def test_a_stream_is_sharded_as_a_range_is(n, first, kw):
    for replicas in (1, 3, 5):
        for rank in range(replicas):
            plain = DistributedSampler(n, replicas, rank, shuffle=False, **kw)
            stream = DistributedSampler(None, replicas, rank, sampler=list(range(n)), **kw)
            assert (len(plain), plain.num_samples, plain.total_size) == (
                len(stream),
                stream.num_samples,
                stream.total_size,
            )
            for sampler in (plain, stream):
                sampler.load_state_dict({"epoch": 0, "seed": 0, "consumed": first})
            expected = plain.indices().tolist()
            assert stream.indices().tolist() == expected
            assert list(stream) == list(plain) == expected
            assert list(stream) == list(plain)  # whole again


class Weighted:
    """A weighted sampler whose stream depends on the epoch alone."""

    def __init__(self, weights, count):
        self.weights, self.count, self.epoch = weights, count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        generator = np.random.default_rng(self.epoch)
        return iter(generator.choice(len(self.weights), self.count, p=self.weights).tolist())


def test_weighted_sampler():
    """K161: a weighted sampler over ranks."""
    weights = np.array([0.1, 0.2, 0.7])
    samplers = [DistributedSampler(None, 4, r, sampler=Weighted(weights, 4000)) for r in range(4)]
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(s) for s in samplers]
        whole = Weighted(weights, 4000)
        whole.set_epoch(epoch)
        interleaved = [item for turn in zip(*parts, strict=True) for item in turn]
        assert interleaved == list(whole)
        assert np.abs(np.bincount(interleaved) / 4000 - weights).max() < 0.03


def test_torch_weighted_sampler():
    def inner():
        generator = torch.Generator().manual_seed(7)
        return torch_data.WeightedRandomSampler([1.0, 3.0], 1000, generator=generator)

    parts = [list(DistributedSampler(None, 2, rank, sampler=inner())) for rank in range(2)]
    assert [i for pair in zip(*parts, strict=True) for i in pair] == list(inner())
    for kind in (torch_data.RandomSampler, torch_data.SubsetRandomSampler):
        with pytest.warns(UserWarning, match=f"{kind.__name__} without a generator"):
            DistributedSampler(None, 2, 0, sampler=kind([1, 2, 3]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DistributedSampler(None, 2, 0, sampler=kind([1, 2, 3], generator=torch.Generator()))


def test_stream_without_end_or_length():
    def count():
        number = 0
        while True:
            yield f"item {number}"
            number += 1

    sampler = DistributedSampler(None, 3, 2, sampler=count())
    assert advance(sampler, 3) == ["item 2", "item 5", "item 8"]
    assert sampler.state_dict()["consumed"] == 9
    with pytest.raises(TypeError, match="len"):
        len(sampler)


def test_forgotten_set_epoch_warns_once():
    sampler = DistributedSampler(10, 2, 0)
    list(sampler)
    with pytest.warns(UserWarning, match="set_epoch") as caught:
        list(sampler)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler)  # once only
        good = DistributedSampler(10, 2, 0)
        for epoch in range(3):
            good.set_epoch(epoch)
            list(good)
        advance(DistributedSampler(10, 2, 0), 2)
        peeked = DistributedSampler(10, 2, 0)
        advance(peeked, 2)
        list(peeked)  # the first whole pass
        for quiet in (
            DistributedSampler(10, 2, 0, shuffle=False),
            DistributedSampler(0, 2, 0),
            DistributedSampler(None, 2, 0, sampler=range(4)),
        ):
            list(quiet)
            list(quiet)


def test_an_evaluation_twice_in_an_epoch_is_no_forgotten_set_epoch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = DistributedSampler(10, 2, 0)
        for epoch in range(2):
            told.set_epoch(epoch)
            list(told)
            list(told)
        evaluated = DistributedSampler(10, 2, 0)
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                list(evaluated)
                list(evaluated)
        list(evaluated)  # the first pass of a training
        with torch.no_grad():
            list(evaluated)
    with pytest.warns(UserWarning, match="set_epoch"):
        list(evaluated)
    resumed = DistributedSampler(10, 2, 0)
    resumed.load_state_dict({"epoch": 1, "seed": 0, "consumed": 0})
    list(resumed)
    with pytest.warns(UserWarning, match="set_epoch"):
        list(resumed)


def test_pickle_and_copy():
    sampler = DistributedSampler(20, 2, 1, seed=3, pad=False)
    sampler.set_epoch(2)
    expected = sampler.indices().tolist()
    advance(sampler, 4)
    for other in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert list(other) == expected


def test_length_may_change_between_passes():
    data = [0] * 10
    sampler = DistributedSampler(data, 2, 0, shuffle=False)
    assert len(list(sampler)) == 5
    data += [0] * 10
    assert len(sampler) == len(list(sampler)) == sampler.num_samples == 10


def test_threads_fill_at_once():
    expected = DistributedSampler(200_000, 2, 1, seed=9).indices()
    results = [None] * 4

    def fill(i):
        results[i] = DistributedSampler(200_000, 2, 1, seed=9).indices()

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(np.array_equal(r, expected) for r in results)


def test_subclasses_with_an_order_of_their_own():
    """They set num_samples and total_size, as those of torch's class do."""

    def evaluation(base):
        class Evaluation(base):
            def __init__(self, dataset, **kw):
                super().__init__(dataset, shuffle=False, **kw)
                self.total_size = len(self.dataset)
                self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

            def __iter__(self):
                return iter(range(self.rank, self.total_size, self.num_replicas))

        return [Evaluation(range(11), num_replicas=3, rank=rank) for rank in range(3)]

    pairs = zip(evaluation(DistributedSampler), evaluation(torch_data.DistributedSampler), strict=True)
    for ours, theirs in pairs:
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, 11)
