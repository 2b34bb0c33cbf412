"""What the tests of collectives share.

Inputs of every rank, results in NumPy by the rules of csrc/simd/reduce.h, layouts.
"""

import functools

import cdist
import ml_dtypes
import numpy as np
from cdist import ReduceOp

TRANSPORTS = ["shm", "tcp"]

NUMBERS = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "longdouble", "clongdouble",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
OTHERS = ["M8[ns]", "m8[s]", "S7", "U3", "V5", "i4,f8", ">f4", ">i2", "int4"]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
FACTOR = 0.37


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def legal(op, name):
    """The table of csrc/base/op.h, written down again."""
    if op in ("SUM", "PRODUCT"):
        return True
    if op in ("MIN", "MAX"):
        return "c" not in dtype_of(name).kind
    if op == "AVG":
        return name != "bool"
    if op == "PREMUL_SUM":
        return dtype_of(name).kind in "fcV" or name.startswith(("bfloat", "float"))
    return name == "bool" or "int" in name


def redop(op):
    return ReduceOp(ReduceOp.PREMUL_SUM, FACTOR) if op == "PREMUL_SUM" else ReduceOp.RedOpType[op]


def data(rank, name, shape, seed=0):
    """The input of a rank: the same for every process that asks."""
    rng = np.random.default_rng((seed, rank, int(np.prod(shape, dtype=int)) & 0xFFFF))
    dtype = dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name == "int4":
        return rng.integers(-8, 8, shape).astype(dtype)
    if name in NUMBERS and "complex" not in name and name != "clongdouble":
        if "int" in name:
            return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        return (rng.standard_normal(shape) * 2).astype(dtype)
    if "complex" in name or name == "clongdouble":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    raw = rng.integers(65, 90, (*shape, dtype.itemsize), np.uint8)
    if dtype.kind == "U":
        return np.frombuffer((raw.reshape(-1, 4)[:, 0].astype("u4")).tobytes(), dtype).reshape(shape)
    return np.ascontiguousarray(raw).view(dtype)[..., 0]


def _is_short(dtype):
    return dtype.itemsize <= 2 and (dtype.kind == "f" or "float" in dtype.name)


def _divide(total, n):
    if total.dtype.kind in "iu":
        wide = total.astype(object)
        return np.array([abs(v) // n * (1 if v >= 0 else -1) for v in wide.ravel()], object).reshape(
            total.shape).astype(total.dtype)  # fmt: skip
    if total.dtype.kind == "c":
        return (total.view(total.real.dtype).reshape(*total.shape, 2) / total.real.dtype.type(n)).view(
            total.dtype
        )[..., 0]
    return total / total.dtype.type(n)


def reduced(op, inputs):
    """The reduction from rank 0 on, with 16-bit and 8-bit floats in float32."""
    dtype = inputs[0].dtype
    short = _is_short(dtype)
    xs = [np.array(x, np.float32 if short else dtype, order="C") for x in inputs]
    kind = xs[0].dtype
    with np.errstate(all="ignore"):
        if op == "PREMUL_SUM":
            real = np.dtype(kind.type(0).real.dtype).type
            xs = [multiply(x, real(FACTOR)) for x in xs]
        function = {
            "SUM": np.logical_or if kind == np.bool_ else np.add, "AVG": np.add, "PREMUL_SUM": np.add,
            "PRODUCT": np.logical_and if kind == np.bool_ else np.multiply,
            "MIN": np.minimum, "MAX": np.maximum,
            "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
        }[op]  # fmt: skip
        if op == "PRODUCT" and kind.kind == "c":
            function = complex_product
        total = functools.reduce(function, xs)
        if op == "AVG":
            total = _divide(total, len(xs))
        return np.asarray(total).astype(dtype)


def multiply(x, factor):
    if x.dtype.kind != "c":
        return x * factor
    return np.ascontiguousarray(x).view(type(factor)).__mul__(factor).view(x.dtype).reshape(x.shape)


def stack(arrays):
    """As np.stack, which turns the bytes of foreign orders."""
    out = np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    for i, x in enumerate(arrays):
        out[i] = x
    return out


def complex_product(a, b):
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def _base(shape, dtype):
    return np.empty(shape, dtype)


LAYOUTS = {
    "contiguous": lambda x: (_base(x.shape, x.dtype), lambda b: b),
    "strided": lambda x: (
        _base([2 * n + 1 for n in x.shape], x.dtype),
        lambda b: b[tuple([slice(1, None, 2)] * b.ndim)],
    ),
    "transposed": lambda x: (_base(x.shape[::-1], x.dtype), lambda b: b.T),
    "negative": lambda x: (_base(x.shape, x.dtype), lambda b: b[tuple([slice(None, None, -1)] * b.ndim)]),
    "offset": lambda x: (
        _base([n + 3 for n in x.shape], x.dtype),
        lambda b: b[tuple([slice(1, -2)] * b.ndim)],
    ),
}


def place(x, layout):
    """Return an array with x's values and this layout, and a function: was memory around it written?"""
    base, cut = LAYOUTS[layout](x)
    raw = base.reshape(-1).view(np.uint8) if base.size else np.empty(0, np.uint8)
    raw[...] = 0x5A
    array = cut(base)
    array[...] = x
    outside = np.ones(base.shape, bool)
    cut(outside)[...] = False

    def spoiled():
        gaps = base[outside]
        return bool(gaps.size) and (np.frombuffer(gaps.tobytes(), np.uint8) != 0x5A).any()

    return array, spoiled


def same(got, want):
    """The same shape and bits; padding of long doubles does not count, and one NaN is as good as another."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if got.dtype.char in "gG":
        return bool(((got == want) | ((got != got) & (want != want))).all())
    a, b = np.ascontiguousarray(got), np.ascontiguousarray(want)
    if a.tobytes() == b.tobytes():
        return True
    if a.dtype.kind in "fc" or "float" in a.dtype.name:
        nan = np.asarray((a != a) & (b != b), bool)
        return a[~nan].tobytes() == b[~nan].tobytes()
    return False


def calls(kind, rank, world, name, shape, layout="contiguous", op="SUM", seed=0, **options):
    """Run one collective.

    Yields pairs (what it gave, what it must give) and last whether memory around was written.
    """
    mine = functools.partial(data, name=name, seed=seed)
    spoils = []

    def put(x):
        array, spoiled = place(np.asarray(x), layout)
        spoils.append(spoiled)
        return array

    def zeros(want):
        return put(np.zeros(want.shape, want.dtype))

    run = getattr(cdist, kind)
    inputs = [data(r, name, shape, seed) for r in range(world)]
    root = (seed + 1) % world

    def wait(work):
        if options.get("async_op"):
            work.wait()

    if kind == "all_reduce":
        x = put(inputs[rank])
        wait(run(x, redop(op), **options))
        yield x, reduced(op, inputs)
    elif kind == "reduce":
        x = put(inputs[rank])
        wait(run(x, root, redop(op), **options))
        yield x, reduced(op, inputs) if rank == root else inputs[rank]
    elif kind == "broadcast":
        x = put(inputs[rank])
        wait(run(x, root, **options))
        yield x, inputs[root]
    elif kind == "all_gather":
        outs = [zeros(x) for x in inputs]
        wait(run(outs, put(inputs[rank]), **options))
        yield from zip(outs, inputs, strict=True)
    elif kind == "all_gather_into_tensor":
        want = stack(inputs)
        out = zeros(want)
        wait(run(out, put(inputs[rank]), **options))
        yield out, want
    elif kind == "gather":
        outs = [zeros(x) for x in inputs] if rank == root else None
        wait(run(put(inputs[rank]), outs, root, **options))
        yield from zip(outs or [], inputs if outs else [], strict=True)
    elif kind == "scatter":
        out = zeros(inputs[rank])
        parts = [put(x) for x in inputs] if rank == root else None
        wait(run(out, parts, root, **options))
        yield out, inputs[rank]
    elif kind in ("reduce_scatter", "reduce_scatter_tensor"):
        blocks = [[mine(r * 100 + j, shape=shape) for j in range(world)] for r in range(world)]
        want = reduced(op, [blocks[r][rank] for r in range(world)])
        out = zeros(want)
        source = [put(b) for b in blocks[rank]] if kind == "reduce_scatter" else put(stack(blocks[rank]))
        wait(run(out, source, redop(op), **options))
        yield out, want
    elif kind in ("all_to_all", "all_to_all_single"):
        blocks = [[mine(r * 100 + j, shape=shape) for j in range(world)] for r in range(world)]
        want = [blocks[r][rank] for r in range(world)]
        if kind == "all_to_all":
            outs = [zeros(x) for x in want]
            wait(run(outs, [put(b) for b in blocks[rank]], **options))
            yield from zip(outs, want, strict=True)
        else:
            out = zeros(stack(want))
            wait(run(out, put(stack(blocks[rank])), **options))
            yield out, stack(want)
    elif kind == "send":
        right, left = (rank + 1) % world, (rank - 1) % world
        out = zeros(inputs[left])
        works = cdist.batch_isend_irecv(
            [
                cdist.P2POp(cdist.isend, put(inputs[rank]), right, tag=seed),
                cdist.P2POp(cdist.irecv, out, left, tag=seed),
            ]
        )
        for work in works:
            work.wait()
        yield out, inputs[left]
    for spoiled in spoils:
        yield np.array(spoiled()), np.array(False)


REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send",
]


def failures(cases, rank, world):
    """Runs the cases, each a dict for calls(), and returns texts of those that went wrong."""
    wrong = []
    for number, case in enumerate(cases):
        if case["kind"] == "send" and world == 1:
            continue
        for got, want in calls(rank=rank, world=world, seed=number, **case):
            if not same(got, want):
                wrong.append(f"{case}: got {got.ravel()[:4]}, want {want.ravel()[:4]}")
                break
    return wrong[:5]
