"""Programs as people write them for torch.distributed, with the import lines changed."""

import copy
import gc
import inspect
import io

import cdist
import numpy as np
import pytest
from cdist.testing import run

torch = pytest.importorskip("torch")
from cdist.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()


# ---------------------------------------------------------------------------------------------- calls


def _columns(rank, world):
    """Parts of one tensor that lie between each other are places of their own."""
    mine = torch.full((3, 2), rank + 1.0)
    whole = torch.zeros(3, 2 * world)
    cdist.all_gather(list(whole.chunk(world, dim=1)), mine)
    assert whole.tolist() == [[r + 1.0 for r in range(world) for _ in range(2)]] * 3
    every_other = torch.zeros(4, world)
    cdist.all_gather([every_other[:, r] for r in range(world)], torch.full((4,), rank + 1.0))
    assert every_other.tolist() == [[r + 1.0 for r in range(world)]] * 4
    backwards = np.zeros((world, 3))[::-1, ::-1]
    cdist.all_gather([backwards[r] for r in range(world)], np.arange(3.0) + rank)
    assert backwards.tolist() == [[r, r + 1.0, r + 2.0] for r in range(world)]
    pairs = np.zeros(5, np.complex128)
    cdist.all_gather([pairs.real, pairs.imag][:world] + [np.zeros(5)] * (world - 2), np.full(5, rank + 1.0))
    assert pairs.tolist() == [1 + 2j] * 5
    halves = np.arange(4.0 * world).reshape(2 * world, 2)
    cdist.all_to_all_single(halves[:, 0], halves[:, 1])
    assert halves[2 * rank, 0] == halves[2 * rank, 1]
    return "ok"


def test_columns_of_one_array_are_outputs():
    assert run(_columns, 2) == ["ok"] * 2


def _overlaps(rank, world):
    x = np.ones(3)
    with pytest.raises(ValueError, match=r"entries 0 and 1 of `tensor_list` share memory.*n times the same"):
        cdist.all_gather([np.zeros(3)] * 2, x)
    strip = np.zeros(6)
    with pytest.raises(ValueError, match="share memory"):
        cdist.all_gather([strip[:3], strip[2:5]], x)
    with pytest.raises(ValueError, match="share memory"):
        cdist.all_gather([strip[::2], strip[::-1][1::2]], x)  # elements 0 2 4 and 4 2 0
    grid = np.zeros((4, 4))
    with pytest.raises(ValueError, match="share memory"):
        cdist.all_gather([grid[:, 1], grid[2]], np.ones(4))  # a column and a row cross
    with pytest.raises(ValueError, match="share memory"):
        cdist.all_gather([grid[:, 1:3], grid[:, 2:]], np.ones((4, 2)))
    cdist.all_gather([grid[:2, 1], grid[3, :2]], np.ones(2))
    assert grid.sum() == 4
    return "ok"


def test_outputs_that_share_elements_are_refused():
    assert run(_overlaps, 2) == ["ok"] * 2


def _empty_lists(rank, world):
    """``gather(x, [] …)`` where there is no list: as in torch's tutorials."""
    x = torch.full((2,), rank + 1.0)
    places = [torch.zeros(2) for _ in range(world)] if rank == 0 else []
    assert cdist.gather(x, places, dst=0) is None
    assert [p.tolist() for p in places] == ([[1.0, 1.0], [2.0, 2.0]] if rank == 0 else [])
    got = torch.zeros(2)
    cdist.scatter(got, list(torch.arange(4.0).chunk(2)) if rank == 0 else [], src=0)
    assert got.tolist() == [2.0 * rank, 2.0 * rank + 1]
    cdist.scatter(got, list(torch.arange(4.0).chunk(2)) if rank == 0 else [], src=0, async_op=True).wait()
    with pytest.raises(ValueError, match="gather_list`` must be specified on destination rank"):
        cdist.gather(x, [], dst=rank)
    objects = [None] * world if rank == 1 else []
    cdist.gather_object(("rank", rank), objects, dst=1)
    assert objects == ([("rank", 0), ("rank", 1)] if rank == 1 else [])
    return "ok"


def test_an_empty_list_is_no_list():
    assert run(_empty_lists, 2) == ["ok"] * 2


def _object_lists(rank, world):
    """torch fills the first places of a list that is longer than the group."""
    places = [None, None, "mine"]
    cdist.all_gather_object(places, rank)
    assert places == [0, 1, "mine"]
    places = [None, None, "mine"] if rank == 0 else None
    cdist.gather_object(rank, places)
    assert rank or places == [0, 1, "mine"]
    with pytest.raises(ValueError, match=r"has 0 places for 2 ranks: pass \[None\] \* 2"):
        cdist.all_gather_object([], rank)
    with pytest.raises(TypeError, match=r"object_list must be a list with a place for each rank.*not tuple"):
        cdist.all_gather_object((None, None), rank)
    with pytest.raises(TypeError, match=r"must be a list \(one object: \[x\]\), not str"):
        cdist.broadcast_object_list("abc")
    return "ok"


def test_places_for_objects():
    assert run(_object_lists, 2) == ["ok"] * 2


def _outside(rank, world):
    group = cdist.new_group([0])
    if rank == 0:
        assert cdist.get_process_group_ranks(group) == [0]
        return "ok"
    assert (cdist.get_rank(group), cdist.get_world_size(group)) == (-1, -1)
    with pytest.raises(ValueError, match="rank 1 is not in it.*keep the list"):
        cdist.get_process_group_ranks(group)
    with pytest.raises(ValueError, match="Group 'x' is not registered"):
        cdist.get_rank("x")
    with pytest.raises(ValueError, match="only the members of a group wrap a module"):
        DDP(nn.Linear(1, 1), process_group=group)
    return "ok"


def test_ranks_outside_of_a_group():
    assert run(_outside, 2) == ["ok"] * 2


@pytest.mark.parametrize(("make", "remedy"), [
    (lambda: torch.eye(2).to_sparse(), r"it is sparse; pass .* tensor.to_dense\(\)"),
    (lambda: torch.eye(2).to_sparse_csr(), r"it is sparse; .* tensor.to_dense\(\)"),
    (lambda: torch.empty(2, device="meta"), "it is a meta tensor"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantized; .*int_repr\(\)"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "it is nested"),
    (lambda: [1.0, 2.0], r"but got list instead: numbers go as numpy.array\(x\)"),
    (lambda: (torch.ones(1),), "but got tuple instead: .*several arrays one by one"),
], ids=["sparse", "csr", "meta", "quantized", "nested", "list", "tuple"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_sent_says_what_can(make, remedy):
    def call(rank, world):
        with pytest.raises(TypeError, match=remedy):
            cdist.all_reduce(make())
        return "ok"

    assert run(call, 1) == ["ok"]


def _flattened(rank, world):
    mesh = cdist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    assert mesh["dp_tp"] is flat
    assert mesh.get_group("dp_tp") is flat.get_group()
    assert cdist.get_process_group_ranks(flat.get_group()) == [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert mesh["pp", "tp"].get_coordinate() == (rank // 2, rank % 2)
    with pytest.raises(KeyError, match="Invalid mesh_dim_name 'dp_pp'"):
        mesh["dp_pp"]
    return "ok"


def test_flattened_meshes_are_known_to_the_root():
    assert run(_flattened, 4) == ["ok"] * 4


def test_debug_level_prints_as_torchs():
    assert str(cdist.DebugLevel.OFF) == "DebugLevel.OFF"
    assert cdist.DebugLevel.DETAIL > cdist.DebugLevel.INFO


# ---------------------------------------------------------------------------------------------- training


def data(rank, rows=8, columns=4):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 + rank))


def gradients(module):
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in module.parameters()]


def mean_of_ranks(module, loss, world):
    """Gradients of the mean of the ranks' losses, in one process."""
    alone = copy.deepcopy(module)
    (sum(loss(alone, r) for r in range(world)) / world).backward()
    return gradients(alone)


class Words(nn.Module):
    """Two sparse embeddings, one of them used now and then, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 4, sparse=True)
        self.bag = nn.EmbeddingBag(6, 4, sparse=True, mode="sum")
        self.out = nn.Linear(4, 2)

    def forward(self, x, bag=True):
        words = self.words(x)
        return self.out(words + self.bag(x[:, None] % 6) if bag else words)


def _sparse(rank, world, kwargs):
    ddp = DDP(Words(), **kwargs)
    for step in range(3):
        before = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        ddp(torch.tensor([rank, 5, step])).pow(2).sum().backward()
        assert ddp.module.words.weight.grad.is_sparse
        assert ddp.module.words.weight.grad.is_coalesced()
        want = mean_of_ranks(before, lambda m, r, at=step: m(torch.tensor([r, 5, at])).pow(2).sum(), world)
        for mine, theirs in zip(gradients(ddp), want, strict=True):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.1 * p.grad
    return [p.detach().numpy().tobytes() for p in ddp.parameters()]


@pytest.mark.parametrize("kwargs", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True},
                                    {"find_unused_parameters": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_sparse_embeddings(world, kwargs):
    results = run(_sparse, world, kwargs)
    assert all(result == results[0] for result in results)


def _sparse_by_turns(rank, world):
    """Used on one rank, on no rank, and never; a pass without synchronisation; ranks that run out of data."""
    ddp = DDP(Words(), find_unused_parameters=True)
    ddp(torch.tensor([1, 2]), bag=rank == 0).sum().backward()
    want = mean_of_ranks(ddp.module, lambda m, r: m(torch.tensor([1, 2]), bag=r == 0).sum(), world)
    for mine, theirs in zip(gradients(ddp), want, strict=True):
        torch.testing.assert_close(mine, theirs)
    ddp.zero_grad()
    ddp(torch.tensor([1]), bag=False).sum().backward()
    assert ddp.module.bag.weight.grad is None
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(torch.tensor([rank])).sum().backward()
    ddp(torch.tensor([rank + 2])).sum().backward()
    want = mean_of_ranks(
        ddp.module, lambda m, r: m(torch.tensor([r])).sum() + m(torch.tensor([r + 2])).sum(), world
    )
    for mine, theirs in zip(gradients(ddp), want, strict=True):
        torch.testing.assert_close(mine, theirs)
    short = DDP(Words())
    with short.join():
        for step in range(1 + rank):
            short.zero_grad()
            short(torch.tensor([rank, step])).sum().backward()
    return [p.detach().numpy().tobytes() for p in short.parameters()]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_sparse_embeddings_that_are_used_by_turns():
    first, second = run(_sparse_by_turns, 2)
    assert first == second


def _sparse_limits(rank, world):
    with pytest.raises(RuntimeError, match="reduce='weights' does not go with sparse gradients"):
        DDP(Words(), reduce="weights")
    with pytest.raises(RuntimeError, match="sparse gradients .* are in no bucket"):
        DDP(Words()).register_comm_hook(None, lambda state, bucket: None)
    return "ok"


def test_what_sparse_gradients_do_not_go_with():
    assert run(_sparse_limits, 1) == ["ok"]


def _wrapped_again(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for _ in range(3):  # cross-validation: the old wrapper goes, its module stays
        ddp = DDP(module)
        module.zero_grad()
        ddp(data(rank)).sum().backward()
        want = mean_of_ranks(module, lambda m, r: m(data(r)).sum(), world)
        for mine, theirs in zip(gradients(module), want, strict=True):
            torch.testing.assert_close(mine, theirs)
        del ddp
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    module.zero_grad()
    module(data(rank)).sum().backward()  # no collective: the ranks need not do it together
    alone = copy.deepcopy(module)
    alone.zero_grad()
    alone(data(rank)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(module), gradients(alone), strict=True))
    return "ok"


def test_a_module_that_is_wrapped_again():
    assert run(_wrapped_again, 2) == ["ok"] * 2


def _looked_at(rank, world):
    ddp = DDP(nn.Linear(2, 2), output_device=0)  # torch takes 0 for none, on a CPU
    assert ddp.process_group is cdist.group.WORLD
    assert ddp.output_device is None
    stream = io.BytesIO()
    torch.save(ddp, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False).process_group is cdist.group.WORLD
    return "ok"


def test_what_users_look_at():
    assert run(_looked_at, 1) == ["ok"]
    names = list(inspect.signature(DDP).parameters)
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    assert names[: len(theirs)] == theirs
