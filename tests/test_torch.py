"""Each private name of torch that the project uses still does what it is used for."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxckpt import _torch


def test_sequence_number_is_that_of_the_next_autograd_node() -> None:
    x = torch.ones(2, requires_grad=True)
    expected = _torch.sequence_number()
    y = x * 2
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == expected
    assert _torch.sequence_number() == expected + 1


def test_tracer_and_nodes_of_tensors_within_a_trace() -> None:
    outside = torch.ones(2)
    seen: dict[str, Any] = {}

    def traced(x: Tensor) -> Tensor:
        tracer = _torch.current_tracer()
        y = x.sin()
        seen["nodes"] = [_torch.proxy_node(t, tracer) for t in (x, y, outside)]
        seen["graph"] = tracer.graph
        return y

    make_fx(traced)(torch.ones(2))
    x_node, y_node, nothing = seen["nodes"]
    assert (x_node.op, y_node.target, nothing) == ("placeholder", torch.ops.aten.sin.default, None)
    assert y_node in seen["graph"].nodes
    with pytest.raises(AssertionError):
        _torch.current_tracer()


def test_functional_value_includes_pending_writes() -> None:
    values = []

    def written(x: Tensor) -> Tensor:
        y = x.clone()
        values.append(_torch.functional_value(y))
        y[0].add_(5)
        values.append(_torch.functional_value(y))
        return y

    torch.func.functionalize(written, remove="mutations")(torch.zeros(2))
    assert [value.tolist() for value in values] == [[0, 0], [5, 0]]
    plain = torch.ones(1)
    assert _torch.functional_value(plain) is plain


@pytest.mark.parametrize("fake", [False, True])
def test_storage_key_tells_who_shares_memory(fake: bool) -> None:
    with _torch.FakeTensorMode() if fake else torch.no_grad():
        x = torch.ones(2, 3)
        view, other = x.t()[1:], x.clone()
    assert isinstance(x, _torch.FakeTensor) == fake
    assert _torch.storage_key(x) == _torch.storage_key(view) == _torch.storage_key(x.detach())
    assert _torch.storage_key(x) != _torch.storage_key(other)


def test_operators_are_told_from_functions() -> None:
    assert _torch.is_operator(torch.ops.aten.add.Tensor)
    assert not any(_torch.is_operator(other) for other in (torch.add, torch.ops.aten.add, len, "add"))


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 3)[::2], False),
        (torch.ones(1).expand(4), False),
        (torch.eye(3).to_sparse(), False),
    ],
)
def test_dense(tensor: Tensor, dense: bool) -> None:
    assert _torch.is_dense(tensor) is dense


def test_function_transforms_are_noticed() -> None:
    seen = []

    def probe(x: Tensor) -> Tensor:
        seen.append(_torch.transform_active())
        return x.sum()

    torch.vmap(probe)(torch.ones(2, 2))
    torch.func.grad(probe)(torch.ones(2))
    probe(torch.ones(2))
    assert seen == [True, True, False]


def test_below_autograd_nothing_is_recorded_or_cast() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with _torch.below_autograd():
            product, view = x @ x, x[0]
        after = x @ x
    assert (product.requires_grad, product.dtype) == (False, torch.float32)
    assert not view._is_view()
    assert (after.requires_grad, after.dtype) == (True, torch.bfloat16)


@pytest.mark.parametrize("retain", [False, True])
def test_clear_saved_frees_unless_the_graph_is_retained(retain: bool) -> None:
    alive: list[bool] = []
    saved: list[weakref.ref[Tensor]] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x * 3
            saved.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            values = ctx.saved_tensors
            assert len(values) == 1
            del values
            _torch.clear_saved(ctx)
            alive.append(saved[0]() is not None)
            return grad

    out = Keeps.apply(torch.ones(2, requires_grad=True)).sum()
    out.backward(retain_graph=retain)
    assert alive == [retain]


def test_boxed_arguments_die_at_their_last_use() -> None:
    graph = fx.Graph()
    graph.set_codegen(_torch.BoxedCodeGen())
    alive = []

    def watch(value: Tensor, of: Any) -> Tensor:
        alive.append(of() is not None)
        return value

    x, y, of = graph.placeholder("x"), graph.placeholder("y"), graph.placeholder("of")
    total = graph.call_function(torch.add, (x, y))
    watched = graph.call_function(watch, (total, of))
    graph.output([watched])
    module = fx.GraphModule(nn.Module(), graph)
    first = torch.ones(2)
    boxed: list[Any] = [first, torch.ones(2), weakref.ref(first)]
    del first
    (result,) = module.forward(boxed)
    assert result.tolist() == [2, 2]
    assert (alive, boxed) == ([False], [])


@pytest.mark.parametrize("reentrant", [False, True])
def test_inner_checkpoints_run_plainly_here_and_nowhere_else(reentrant: bool) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(threading.get_ident())
        return x.sin()

    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()

    with _torch.without_inner_checkpoints():
        step()
        other = threading.Thread(target=step)
        other.start()
        other.join()
    here = calls.count(threading.get_ident())
    assert (here, len(calls) - here) == (1, 2)
    step()
    assert calls.count(threading.get_ident()) == 3


def test_inner_checkpoints_come_back_after_an_error() -> None:
    before = vars(torch.utils.checkpoint).copy()
    with pytest.raises(KeyError), _torch.without_inner_checkpoints():
        raise KeyError
    assert vars(torch.utils.checkpoint) == before
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_allocations_in_order() -> None:
    old = torch.empty(5_000, dtype=torch.uint8)

    def run() -> None:
        nonlocal old
        first = torch.empty(1_000, dtype=torch.uint8)
        del old  # from before: not in the record
        second = torch.empty(3_000, dtype=torch.uint8)
        del first
        second.resize_(4_000)

    found = [count for count in _torch.cpu_allocations(run) if abs(count) >= 1_000]
    assert found == [1_000, 3_000, -1_000, 4_000, -3_000, -4_000]


def test_every_name_is_listed() -> None:
    own = {name for name, value in vars(_torch).items() if getattr(value, "__module__", "") == _torch.__name__}
    assert {name for name in own if not name.startswith("_")} <= set(_torch.__all__)


def test_traced_and_lazy_graph_modules_make_their_code_on_demand() -> None:
    module = _torch.traced(lambda x: (x * 2).relu(), [torch.randn(3)])
    assert [node.target for node in module.graph.nodes][1:3] == [torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default]
    x = torch.randn(3)
    assert torch.equal(module(x), (x * 2).relu())
    lazy = _torch.lazy_graph_module(torch.nn.Module(), module.graph, "named")
    assert isinstance(lazy, torch.fx.GraphModule)
    assert torch.equal(lazy(x), (x * 2).relu())
    assert "relu" in lazy.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [(2, 3), (3, 2), (2, 2), (3, 3)])
def test_fakes_of_grouped_products_look_like_the_real_ones(left: int, right: int, dtype: torch.dtype) -> None:
    shapes = [(2, 8, 16), (2, 16, 24)]
    if (left, right) == (2, 2):
        shapes = [(8, 16), (16, 24)]
    elif left == 2:
        shapes[0] = (8, 16)
    elif right == 2:
        shapes[1] = (16, 24)
    pair = [torch.ones(shape, dtype=dtype) for shape in shapes]
    offsets = torch.tensor([8, 16 if left == right else 24 if right == 2 else 8], dtype=torch.int32)
    given = {} if left == right == 3 else {"offs": offsets}
    real = torch.nn.functional.grouped_mm(*pair, **given)
    mode = _torch.FakeMode()
    with mode:
        fake = torch.nn.functional.grouped_mm(
            *map(mode.from_tensor, pair), **{key: mode.from_tensor(value) for key, value in given.items()}
        )
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_node_knows_whether_its_graph_is_kept() -> None:
    kept: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: kept.append(_torch.graph_is_kept()))
    total = y.sum()
    total.backward(retain_graph=True)
    total.backward()
    assert kept == [True, False]


def test_fakes_made_fast_are_like_those_of_the_mode() -> None:
    mode = _torch.FakeMode(allow_non_fake_inputs=True)
    slow = mode.from_tensor(torch.randn(4, 6).t())
    fast = _torch.FakeMaker(mode).make((6, 4), (1, 6), torch.float32, torch.device("cpu"))
    assert type(fast) is type(slow) is _torch.FakeTensor
    assert fast.__dict__.keys() == slow.__dict__.keys()
    for fake in (fast, slow):
        assert (fake.shape, fake.stride(), fake.dtype, fake.device.type) == ((6, 4), (1, 6), torch.float32, "cpu")
        fake.requires_grad_()
        with mode:
            result = (fake @ torch.ones(4, 3)).sum()
            (gradient,) = torch.autograd.grad(result, fake)
        assert (type(result), gradient.shape) == (_torch.FakeTensor, (6, 4))
    with pytest.raises(RuntimeError):
        fast.data_ptr()


def test_a_bare_mode_has_no_wrapper_around_its_dispatch() -> None:
    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Bare(_torch.BareMode, TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not hasattr(Bare.__torch_dispatch__, "__wrapped__")
    assert hasattr(Plain.__torch_dispatch__, "__wrapped__")
    with Bare():
        assert torch.ones(2).sum() == 2


def test_a_fake_passes_for_a_parameter() -> None:
    maker = _torch.FakeMaker(_torch.FakeMode())
    fake = maker.make((3,), (1,), torch.float32, torch.device("cpu"))
    assert not isinstance(fake, nn.Parameter)
    maker.make_parameter(fake)
    assert isinstance(fake, nn.Parameter)


def test_cpp_asks_for_the_device_of_a_fake_by_an_operator() -> None:
    asked = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    mode = _torch.FakeMode()
    fake = _torch.FakeMaker(mode).make((2, 2), (2, 1), torch.float32, torch.device("cpu")).requires_grad_()
    with mode, Seen():
        (fake * 2).sum().backward()
    assert _torch.DEVICE_QUESTION in asked
