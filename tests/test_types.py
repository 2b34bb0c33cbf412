"""What an editor knows of cdist is true: names that are loaded late, and the stub of the extension."""

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import cdist
import pytest
from cdist import _core

PACKAGE = Path(cdist.__file__).parent
STUB = ast.parse((PACKAGE / "_core.pyi").read_text())
# Of use to the package alone.
PRIVATE = {"IndexIterator", "Reducer", "assign_buckets", "index_count", "index_fill", "settings"}


def _parameters(runtime):
    return [
        (p.name, None if p.default is p.empty else p.default)
        for p in inspect.signature(runtime).parameters.values()
        if p.name != "self"
    ]


def _stub_parameters(function):
    args = [a for a in function.args.posonlyargs + function.args.args if a.arg != "self"]
    defaults = [ast.literal_eval(d) for d in function.args.defaults]
    return [(a.arg, d) for a, d in zip(args, [None] * (len(args) - len(defaults)) + defaults, strict=True)]


def _functions(body):
    return {
        node.name: node for node in body if isinstance(node, ast.FunctionDef) and node.name != "__getattr__"
    }


def _is_property(node):
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def test_the_stub_has_the_functions_of_the_extension():
    stubs = _functions(STUB.body)
    for name, node in stubs.items():
        assert _parameters(getattr(_core, name)) == _stub_parameters(node), name
    public = {n for n in dir(_core) if not n.startswith("_") and inspect.isbuiltin(getattr(_core, n))}
    assert public - PRIVATE <= set(stubs)


def test_the_stub_has_the_classes_of_the_extension():
    there = {n for n in dir(_core) if inspect.isclass(getattr(_core, n)) and not n.startswith("_")}
    assert there - PRIVATE == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_stub_has_the_methods_of_a_class(name):
    kind, stubs = getattr(_core, name), _functions(CLASSES[name].body)
    for method, node in stubs.items():
        if method == "__init__":
            assert _parameters(kind) == _stub_parameters(node)
        elif not _is_property(node):
            assert _parameters(getattr(kind, method)) == _stub_parameters(node), method
        else:
            assert inspect.isdatadescriptor(inspect.getattr_static(kind, method)), method
    assert {method for method in vars(kind) if not method.startswith("_")} <= set(stubs)


def test_names_that_are_loaded_late_are_imported_for_type_checkers():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == cdist._LAZY


def test_a_slip_of_the_pen_is_told():
    with pytest.raises(AttributeError) as caught:
        cdist.allreduce  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("allreduce", cdist)


def _named_parameters(runtime):
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in inspect.signature(runtime).parameters.values() if p.kind not in variadic]
    return {p.name: None if p.default is p.empty else p.default for p in parameters if p.name != "self"}


def _stub_named_parameters(function):
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return dict(_stub_parameters(function)) | {a.arg: d and ast.literal_eval(d) for a, d in keywords}


def test_the_stub_of_distributed_data_parallel_has_its_methods():
    pytest.importorskip("torch", reason="torch comes with EXTRAS in .ci/run")
    from cdist.parallel import ddp
    from cdist.parallel.array_module import ArrayDataParallel
    from cdist.parallel.torch_module import TorchDataParallel

    tree = ast.parse((PACKAGE / "parallel" / "ddp.pyi").read_text())
    [shown] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert shown.name == "DistributedDataParallel"
    assert {n for n, f in vars(ddp).items() if inspect.isfunction(f) and n[0] != "_"} == set(
        _functions(tree.body)
    )
    methods = _functions(shown.body)
    for name, node in methods.items():
        kind = TorchDataParallel if hasattr(TorchDataParallel, name) else ArrayDataParallel
        runtime = inspect.getattr_static(kind, name)
        assert isinstance(runtime, property) == _is_property(node), name
        if not _is_property(node):
            assert _named_parameters(runtime) == _stub_named_parameters(node), name
    ours = [base for base in TorchDataParallel.__mro__ if base.__module__.startswith("cdist")]
    assert {name for base in ours for name in vars(base) if not name.startswith("_")} <= set(methods)


def test_what_calls_return_is_annotated():
    assert typing.get_type_hints(cdist.get_process_group_ranks)["return"] == list[int]
    assert typing.get_type_hints(cdist.batch_isend_irecv)["return"] == list[cdist.Work]
    reduce = typing.get_type_hints(cdist.GradientReducer.reduce)
    assert isinstance(reduce["return"], typing.TypeVar)
    assert reduce["return"] is reduce["grads"]


@pytest.mark.parametrize(
    ("path", "name", "returns"),
    [
        ("memory.py", "empty", ["numpy.ndarray", "Any"]),
        ("launch/record.py", "record", ["Function", "Callable["]),
    ],
)
def test_overloads_have_the_parameters_of_their_function(path, name, returns):
    tree = ast.parse((PACKAGE / path).read_text())
    [shown] = [
        node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test)[0] == "T"
    ]
    overloads = [node for node in shown if isinstance(node, ast.FunctionDef)]
    [real] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [
        ast.unparse(node.returns)[: len(text)] for node, text in zip(overloads, returns, strict=True)
    ] == returns
    for node in overloads:
        assert [a.arg for a in node.args.args] == [a.arg for a in real.args.args]


def test_all_names_are_there_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import inspect
import subprocess
import sys
from cdist import *
from cdist.nn.parallel import *
from cdist.parallel import *
import cdist
assert inspect.getmembers(cdist) and cdist.cuda.empty and cdist.settings.table()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
