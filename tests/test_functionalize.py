"""The joint graph holds pure values, and computes what eager computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxckpt import _torch as torch_private
from fxckpt import functional
from fxckpt.errors import CaptureError
from fxckpt.functional import run_functional
from fxckpt.joint import JointGraph, bernoulli_like, is_alias, sum_gradients
from fxckpt.passes.capture import capture
from fxckpt.passes.functionalize import functionalize

aten = torch.ops.aten


class Residual(nn.Module):
    """Reads its input twice, writes in place, to views and to a buffer, and shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        h = self.linear(x)
        h[:, :2] *= 2
        h += x
        h.relu_()
        left, right = self.linear(h).split(2, dim=1)
        return left * right + h[:, :2] - self.mean[:2], h


def _joint(model: nn.Module, *args: Any) -> JointGraph:
    return functionalize(capture(model, args, {}))


def _run(joint: JointGraph, model: nn.Module, args: tuple[Any, ...], tangents: list[Tensor]) -> tuple[Any, Any]:
    """Outputs, and gradients by input name, of the joint graph run node by node."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = [
        args[int(entry.name)] if entry.kind == "argument" else joint.constants.get(entry.name, tensors.get(entry.name))
        for entry in joint.inputs
    ]
    module = fx.GraphModule(nn.Module(), joint.graph)
    with torch.no_grad():
        outputs, sums = fx.Interpreter(module).run(*inputs, *tangents)
    leaves = [slot for slot, owner in enumerate(joint.slot_owner) if owner < 0 and joint.sums[slot].op != "output"]
    placeholders = [node for node in joint.nodes if node.op == "placeholder"]
    names = [joint.inputs[placeholders.index(joint.slot_values[slot])].name for slot in leaves]
    return outputs, dict(zip(names, sums, strict=True))


def test_outputs_gradients_and_buffers_are_eagers_to_the_bit() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(3, 4, requires_grad=True)
    joint = _joint(model, x)
    tangents = [torch.randn(3, 2), torch.randn(3, 4)]
    found, gradients = _run(joint, model, (x.detach(),), tangents)
    after, model.mean = model.mean.clone(), torch.zeros(4)
    outputs = model(x)
    torch.autograd.backward(outputs, tangents)
    assert all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True))
    assert torch.equal(after, model.mean)
    assert torch.equal(gradients.pop("0"), x.grad)
    assert gradients.keys() == {"linear.weight", "linear.bias"}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, model.get_parameter(name).grad)


class Plain(nn.Module):
    """In-place operators of the plain sort: on fresh results that nothing else refers to, and on a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h += x.sum()
        h = nn.functional.dropout(nn.functional.relu(h, inplace=True), 0.3)
        return self.last(h).mul_(2).view(-1)


@pytest.mark.parametrize("thorough", [False, True])
def test_plain_writes_need_no_second_run(monkeypatch: pytest.MonkeyPatch, thorough: bool) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(5, 4)
    trace = capture(model, (x,), {})
    writes = functional.plain_writes(trace)
    assert writes is not None
    assert len(writes) == 6
    assert [write.target for write, form in writes.items() if form is None] == [aten.add_.Tensor]
    if thorough:
        monkeypatch.setattr(functional, "plain_writes", lambda trace: None)
    joint = functionalize(trace)
    assert [node.target for node in joint.writes] == [aten.add_.Tensor]
    before = copy.deepcopy(model)
    torch.manual_seed(1)
    (found,), gradients = _run(joint, model, (x,), [torch.ones(10)])
    torch.manual_seed(1)
    output = before(x)
    output.sum().backward()
    assert torch.equal(found, output)
    assert all(torch.equal(gradients[name], p.grad) for name, p in before.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


class Uses(nn.Module):
    """A linear layer and what ``use`` makes of its result."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.use(self.linear(x))
        return result


def _with(y: Tensor, change: Any) -> Tensor:
    """``y`` after ``change``."""
    change(y)
    return y


def _shifted(h: Tensor) -> Tensor:
    """As models with a decoder shift their labels: several writes into parts of a new tensor, then one into all."""
    shifted = h.new_zeros(h.shape)
    shifted[..., 1:] = h[..., :-1].clone()
    shifted[..., 0] = 0.5
    shifted[2:3].mul_(2)
    return shifted.masked_fill_(shifted < 0, -1.5)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda h: nn.functional.silu(h, inplace=True),  # whose input autograd has cloned before
        lambda h: nn.functional.hardswish(h * 3, inplace=True) + 1,
        lambda h: torch.ops.aten._unsafe_view(h, [20]).add_(1).relu_(),  # on a view of what nobody else reads
        lambda h: h.mul(2).unsqueeze_(0).t_() if h.dim() == 1 else h.mul(2).unsqueeze_(0),
        lambda h: h * torch.empty_like(h).fill_(0.5).mul_(3),
        lambda h: nn.functional.adaptive_avg_pool2d(h.view(1, 5, 2, 2).permute(0, 2, 3, 1), 1),  # a gradient's view
        lambda h: h * _shifted(h.detach()),
        lambda h: _with(h, lambda y: y[0].mul_(2)) + 1,
        lambda h: _shifted(h) * h,  # through which gradients flow
        lambda h: nn.functional.relu(h.mul(3).view(4, 5), inplace=True).cos(),  # whose gradient is written as a whole
        lambda h: _shifted(_shifted(h.sin())),
        lambda h: _with(h.clone(), lambda y: (y[1:3].zero_(), y.sin().sum(), y[:, 0].mul_(3), y[0].copy_(h[1] * 2))),
    ],
)
def test_more_writes_that_need_no_second_run(monkeypatch: pytest.MonkeyPatch, use: Any, thorough: bool) -> None:
    torch.manual_seed(0)
    model, x = Uses(use), torch.randn(5, 4)
    trace = capture(model, (x,), {})
    assert functional.plain_writes(trace) is not None
    if thorough:
        monkeypatch.setattr(functional, "plain_writes", lambda trace: None)
    joint = functionalize(trace)
    assert bool(joint.origin) is not thorough
    output = model(x)
    (found,), gradients = _run(joint, model, (x,), [torch.ones(output.shape)])
    output.sum().backward()
    assert torch.equal(found, output)
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())
    storages = [torch_private.storage_key(node.meta["val"]) for node in joint.forward if _makes(node)]
    assert len(storages) == len(set(storages))


def _makes(node: fx.Node) -> bool:
    """Whether the node is a tensor of its own and no view."""
    return isinstance(node.meta["val"], Tensor) and not is_alias(node.target)


@pytest.mark.parametrize(
    "write",
    [
        lambda h, x: (name := h.detach(), h.mul_(2), name.sin()),  # of which there is another name
        lambda h, x: h.view(-1).mul_(2),  # which is read under its first name
    ],
)
def test_other_writes_are_functionalized_thoroughly(write: Any) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            write(h, x)
            return h + x

    assert functional.plain_writes(capture(Writing(), (torch.randn(3, 4),), {})) is None


def test_only_updates_write_and_only_sums_add_up() -> None:
    joint = _joint(Residual(), torch.randn(3, 4, requires_grad=True))
    writing = [node for node in joint.nodes if node.op == "call_function" and _writes(node)]
    assert writing == joint.writes
    assert {node.name for node in joint.mutated} == {write.args[0].name for write in joint.writes}
    assert [joint.inputs[joint.nodes.index(node)].name for node in joint.mutated] == ["mean"]
    sums = [node for node in joint.graph.nodes if node.target is sum_gradients]
    assert not set(sums) & set(joint.nodes)
    assert max(len(node.args) for node in sums) >= 2
    assert all("val" in node.meta for node in joint.graph.nodes if node.op != "output")
    joint.graph.lint()


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def test_records_cover_backward_and_read_only_sums_of_gradients() -> None:
    joint = _joint(Residual(), torch.randn(3, 4, requires_grad=True))
    backward = [node for _, _, _, nodes, _ in joint.records for node in nodes]
    given = [node for node in joint.nodes if node.op == "placeholder"]
    assert given + joint.forward + backward == joint.nodes
    allowed = {*given, *joint.forward}
    for _, position, reads, nodes, contributes in joint.records:
        assert 0 <= position < len(joint.forward)
        own = {joint.sums[slot] for slot in reads}
        for node in nodes:
            assert set(node.all_input_nodes) <= allowed | own
            own.add(node)
        assert {node for _, node in contributes} <= allowed | own


def test_forward_positions_of_autograd_nodes_follow_execution() -> None:
    joint = _joint(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.randn(3, 4))
    positions = [position for name, position, *_ in joint.records if name == "AddmmBackward0"]
    assert positions == sorted(positions, reverse=True)
    assert [joint.forward[position].target for position in positions] == [aten.addmm.default] * 5
    assert all(low < high for low, high in joint.forbidden)


def test_results_of_one_operator_are_not_cut_apart() -> None:
    joint = _joint(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4))
    place = {node: index for index, node in enumerate(joint.forward)}
    norm = next(node for node in joint.forward if node.target is aten.native_layer_norm.default)
    last = max(place[user] for user in norm.users if user in place)
    assert any(low <= place[norm] and last <= high for low, high in joint.forbidden)


def test_running_statistics_count_as_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    joint = _joint(model, torch.randn(3, 4))
    names = [joint.inputs[joint.nodes.index(node)].name for node in joint.mutated]
    assert sorted(names) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    model[1].eval()
    assert _joint(model, torch.randn(3, 4)).mutated == []


def test_masks_are_drawn_in_the_order_of_memory() -> None:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.linear(x).t())

    model, x = Permuted(), torch.randn(3, 4)
    joint = _joint(model, x)
    assert bernoulli_like in [node.target for node in joint.forward]
    torch.manual_seed(3)
    (found,), _ = _run(joint, model, (x,), [torch.ones(4, 3)])
    torch.manual_seed(3)
    assert torch.equal(found, model(x))


def test_writing_to_an_input_that_requires_grad_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    with pytest.raises(CaptureError, match="weight"):
        _joint(Writes(4, 4), torch.ones(2, 4))


def test_every_output_and_gradient_of_the_trace_has_a_pure_value() -> None:
    trace = capture(Residual(), (torch.randn(3, 4),), {})
    second = run_functional(trace)
    nodes = set(second.graph.nodes)
    assert len(second.outputs) == len(trace.outputs)
    assert nodes.issuperset(second.outputs)
    wanted = {
        (record.index, kind, place)
        for record in trace.records
        for kind, values in (("total", record.totals), ("part", record.contributions))
        for place, value in enumerate(values)
        if value is not None
    }
    assert second.gradients.keys() == wanted
    assert nodes.issuperset(second.gradients.values())
    assert set(trace.graph_module.graph.nodes).issuperset(second.origin.values())
