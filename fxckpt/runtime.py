"""What the rewritten graph calls while training: the recompute function, its segments, and random state.

All state of a step lives in autograd's context objects, none on the modules: forwards and backwards of the same model
may interleave, in any order and in several threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxckpt import _torch
from fxckpt.joint import bernoulli_like
from fxckpt.listing import Code, Listing
from fxckpt.snapshot import device_random_state, set_device_random_state

__all__ = [
    "RecomputeFunction",
    "RegionCall",
    "Replay",
    "SegmentModule",
    "replay_bernoulli",
    "replay_random",
    "view_gradient",
]


class RecomputeFunction(torch.autograd.Function):
    """Runs a segment: forward keeps what the plan says, backward recomputes the rest and returns the gradients."""

    @staticmethod
    def forward(ctx: Any, segment: SegmentModule, call: RegionCall | None, *inputs: Any) -> tuple[Any, ...]:
        """Outputs of the segment; kept values and generator states go to ``ctx``."""
        with torch.enable_grad(), _torch.below_autograd():  # some kernels ask for the mode to know what backward needs
            outputs, saved, states = segment.forward_code(list(inputs))
        ctx.segment, ctx.call = segment, call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *states)
        if segment.constant_outputs:
            ctx.mark_non_differentiable(*(outputs[index] for index in segment.constant_outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the segment's inputs, None where none arrived."""
        segment: SegmentModule = ctx.segment
        tangents = [grads[index] for index in segment.tangent_outputs]
        present = tuple(tangent is not None for tangent in tangents)
        if not any(present):
            return (None,) * (segment.input_count + 2)
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx, tangents))
        if segment.observer is not None:
            segment.observer(present)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            warnings.warn(
                "fxckpt: backward() runs under torch.autocast, which the plan does not expect: gradients may differ "
                "from those without fxckpt. Leave the autocast block before you call it.", stacklevel=2,
            )  # fmt: skip
        code = segment.backward_code(present)
        boxed = list(ctx.saved_tensors)
        boxed += [tangent for tangent in tangents if tangent is not None]
        del tangents, grads
        _torch.clear_saved(ctx)
        with _torch.below_autograd():
            results = code(boxed)
        if not _torch.graph_is_kept():
            ctx.call = None  # else the region's inputs would live until the graph of the whole step goes
        return (None, None, *results)


class SegmentModule(nn.Module):
    """One segment of the rewritten graph. Calling it runs :class:`RecomputeFunction`.

    Attributes:
        forward_listing: code from a list of inputs to (outputs, saved tensors, generator states).
        specialise: writes the backward for a pattern of present tangents.
        tangent_outputs: which outputs' gradients backward takes, in order.
        constant_outputs: outputs that no gradient flows to.
        observer: told in each backward which gradients arrived.
        detached: inputs that require grad but get none from this segment; they enter detached so that the autograd
            graph has the same edges as in eager.
    """

    def __init__(
        self,
        forward_listing: Listing,
        specialise: Callable[[tuple[bool, ...]], Listing],
        *,
        index: int,
        input_count: int,
        tangent_outputs: tuple[int, ...],
        constant_outputs: tuple[int, ...],
        detached: tuple[int, ...],
        expected: tuple[bool, ...],
        differentiable: bool,
    ) -> None:
        super().__init__()
        self.forward_listing, self.specialise = forward_listing, specialise
        self.forward_code = forward_listing.function()
        self.codes: dict[tuple[bool, ...], Code] = {}
        self.index, self.input_count = index, input_count
        self.tangent_outputs, self.constant_outputs, self.detached = tangent_outputs, constant_outputs, detached
        self.differentiable = differentiable
        self.observer: Callable[[tuple[bool, ...]], None] | None = None
        self.backward_listing: Listing | None = None
        if differentiable:
            self.backward_listing = specialise(expected)
            self.codes[expected] = self.backward_listing.function()

    def show(self) -> None:
        """Add the code as fx graphs: ``forward_graph`` and, if gradients flow, ``backward_graph``."""
        if "forward_graph" not in self._modules:
            self.forward_graph = self.forward_listing.graph_module()
            if self.backward_listing is not None:
                self.backward_graph = self.backward_listing.graph_module()

    def forward(self, call: RegionCall | None, *inputs: Any) -> tuple[Any, ...]:
        """Outputs for later segments and the caller."""
        if not self.differentiable:
            with torch.no_grad(), _torch.below_autograd():
                return tuple(self.forward_code(list(inputs))[0])
        if self.detached:
            entering = list(inputs)
            for index in self.detached:
                entering[index] = entering[index].detach()
            inputs = tuple(entering)
        result: tuple[Any, ...] = RecomputeFunction.apply(self, call, *inputs)
        return result

    def backward_code(self, present: tuple[bool, ...]) -> Code:
        """Backward for this pattern of tangents, built at its first use."""
        if present not in self.codes:
            self.codes[present] = self.specialise(present).function()
        return self.codes[present]


class RegionCall:
    """One forward of a region: what a double backward needs to run it again under autograd.

    The inputs are held until the autograd graph goes; a change to one of them before backward is an error, as in eager.
    """

    def __init__(self, replay: Replay, inputs: list[Any]) -> None:
        self.replay, self.inputs = replay, inputs
        self.versions = [tensor._version if isinstance(tensor, Tensor) else 0 for tensor in inputs]
        self.before = replay.remember(inputs)
        self.segments: list[tuple[list[Tensor | None], dict[int, Tensor]]] | None = None

    def gradients(self, index: int, places: tuple[int, ...], tangents: list[Tensor | None]) -> list[Tensor | None]:
        """Differentiable gradients of the inputs of segment ``index``."""
        if self.segments is None:
            for tensor, version in zip(self.inputs, self.versions, strict=True):
                if (
                    isinstance(tensor, Tensor)
                    and tensor._version != version
                    and not self.replay.writes(tensor, self.inputs)
                ):
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace operation"
                    )
            self.segments = self.replay.run(self.inputs, self.before)
        entering, outputs = self.segments[index]
        pairs = [
            (outputs[place], tangent) for place, tangent in zip(places, tangents, strict=True) if tangent is not None
        ]
        wanted = [tensor for tensor in entering if tensor is not None and tensor.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs], wanted, [tangent for _, tangent in pairs], create_graph=True,
                allow_unused=True,
            )
        )  # fmt: skip
        return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in entering]


class Replay(Protocol):
    """How :class:`RegionCall` runs a region again; see :mod:`fxckpt.double`."""

    def remember(self, inputs: list[Any]) -> Any:
        """Whatever forward is about to change."""

    def writes(self, tensor: Tensor, inputs: list[Any]) -> bool:
        """Whether forward itself writes to this input."""

    def run(self, inputs: list[Any], before: Any) -> list[tuple[list[Tensor | None], dict[int, Tensor]]]:
        """Per segment its inputs and, by place, its outputs, connected by autograd."""


def _differentiable(ctx: Any, tangents: list[Tensor | None]) -> list[Tensor | None]:
    """Backward under ``create_graph=True``: the region's forward is run again under autograd and differentiated."""
    ctx.saved_tensors  # noqa: B018  raises if the graph has been freed, as in eager
    if ctx.call is None:
        raise RuntimeError("this graph was called without a RegionCall, which a double backward needs")
    return ctx.call.gradients(ctx.segment.index, ctx.segment.tangent_outputs, tangents)  # type: ignore[no-any-return]


def replay_random(func: Callable[..., Any], device: torch.device, state: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator again from ``state``; the generator's stream is as before afterwards.

    The operator may have a ``device`` among its own keywords.
    """
    current = device_random_state(device)
    set_device_random_state(device, state)
    try:
        return func(*args, **kwargs)
    finally:
        set_device_random_state(device, current)


def replay_bernoulli(device: torch.device, state: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """:func:`replay_random` of :func:`fxckpt.joint.bernoulli_like`, by a name that generated code can hold."""
    return replay_random(bernoulli_like, device, state, *args, **kwargs)


def view_gradient(gradient: Tensor, size: list[int]) -> Tensor:
    """A view of a gradient, or a copy where its strides do not allow one.

    Autograd reshapes gradients. A loss may send one with other strides than the trace had, which a view cannot take;
    asking first, as ``reshape`` does, costs a microsecond for each of them.
    """
    try:
        return gradient.view(size)
    except RuntimeError:
        return gradient.reshape(size)
