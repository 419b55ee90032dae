"""One forward of a module on fake tensors, after which everything that it touched is as before."""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxckpt import _torch
from fxckpt.errors import CaptureError
from fxckpt.joint import RegionInput
from fxckpt.objects import Setting, Watch, is_setting
from fxckpt.refuse import Refuse, refuse_seeding
from fxckpt.state import INTERNAL, SIMPLE, ModuleState, contains_tensor, find_tensors
from fxckpt.tape import Tape

__all__ = ["Rehearsal", "Settles"]


class Settles(CaptureError):
    """Forward gives values to what had none, as a model does that finds out at its first call what kind of task it has.

    Attributes:
        settings: what it sets; undone when this is raised.
        tape: the operator calls of this forward, and of its backward.
    """

    def __init__(self, message: str, settings: list[Setting], **details: str) -> None:
        super().__init__(message, **details)
        self.settings = settings
        self.tape = Tape()


class Rehearsal:
    """A module with inputs, about to run on fakes of its tensors and of those among the inputs.

    Attributes:
        inputs: what the module reads, in the order of ``tensors``: its own state, then the arguments.
        assigned: (module path, attribute, value) for attributes that forward set.
    """

    def __init__(self, module: nn.Module, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.state = module, state
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *SIMPLE)) and contains_tensor(leaf):
                raise CaptureError(
                    f"an input is a {type(leaf).__name__} that holds tensors",
                    reason=f"input class {type(leaf).__name__} is unknown to torch.utils._pytree",
                )
        self.inputs: list[RegionInput] = []
        self.tensors: list[Tensor] = []
        self.argument_slot: dict[int, int] = {}
        self.assigned: list[tuple[str, str, Any]] = []
        self._list_inputs()

    def _list_inputs(self) -> None:
        known: dict[int, int] = {}
        for held in self.state.tensors:
            known[id(held.tensor)] = len(self.tensors)
            self.inputs.append(RegionInput(held.kind, held.name, held.tensor.requires_grad))
            self.tensors.append(held.tensor)
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) not in known:
                    known[id(leaf)] = len(self.tensors)
                    self.inputs.append(RegionInput("argument", str(index), leaf.requires_grad))
                    self.tensors.append(leaf)
                self.argument_slot[index] = known[id(leaf)]

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Everything that lasts is put back: random states and what forward shares with the world.

        Raises:
            CaptureError: forward changed any of it, so that leaving it out of later steps would be wrong.
        """
        self.casts_are_cached = torch.is_autocast_cache_enabled()
        states, rng = _host_random_state(), torch.get_rng_state()
        watch = Watch(self._shared_objects())
        try:
            yield
        finally:
            moved = _host_random_state() != states
            seeded = not torch.equal(torch.get_rng_state(), rng)
            _restore_host_random_state(states)
            torch.set_rng_state(rng)
            torch.clear_autocast_cache()
            changed, settings = watch.changed(), watch.settings()
            watch.restore()
        if changed:
            text = f"forward changes {changed}"
            raise Settles(text, settings, reason=text) if settings else CaptureError(text, reason=text)
        if seeded:
            raise CaptureError("forward sets the state of torch's generator", reason="torch's generator is set")
        if moved:
            raise CaptureError(
                "forward draws from Python's or NumPy's random generator", reason="Python or NumPy random numbers"
            )
        self._check_assigned()

    def _shared_objects(self) -> Iterator[tuple[str, Any]]:
        """What others see too and forward may write to, apart from tensors and modules."""
        for variable, value in contextvars.copy_context().items():
            yield f"context variable {variable.name!r}", value
        for leaf in self.leaves:
            yield f"an input, a {type(leaf).__name__}", leaf
        for path, module in self.state.modules:
            for key, value in vars(module).items():
                if key not in INTERNAL:
                    yield f"attribute {key!r} of module {path or 'the model'!r}", value

    def _check_assigned(self) -> None:
        plain = [(path, name, value) for path, name, value in self.assigned if not contains_tensor(value)]
        if not plain:
            return
        path, name, _ = plain[0]
        text = f"forward changes attribute {name!r} of module {path or 'the model'!r}"
        reason = f"forward changes attribute {name!r}, which may steer later calls"
        modules = dict(self.state.modules)
        settings: list[Setting] = [(vars(modules[path]), name, value) for path, name, value in plain]
        if all(is_setting(entries.get(name), value) for entries, name, value in settings):
            raise Settles(text, settings, module=path, reason=reason)
        raise CaptureError(text, module=path, reason=reason)

    def forward(self, fakes: list[Tensor], *contexts: Any) -> tuple[Any, list[Tensor]]:
        """Run the module on ``fakes`` within ``contexts``.

        Returns:
            Its output, and the tensors in it and in the attributes that it assigned, each once.
        """
        leaves = list(self.leaves)
        for index, slot in self.argument_slot.items():
            leaves[index] = fakes[slot]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        held = fakes[: len(self.state.tensors)]
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self.casts_are_cached)  # make_fx switches it off
        swapped, plainly = self.state.swapped(held, self.assigned), _torch.without_inner_checkpoints()
        try:
            with swapped, Refuse(), refuse_seeding(), plainly, contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                output = self.module.forward(*args, **kwargs)
                self._check_containers(args, kwargs, leaves)
        finally:
            torch.set_autocast_cache_enabled(cached)
        for fake in fakes:
            if fake.requires_grad and fake.grad is not None:
                raise CaptureError("forward runs backward() itself", reason="backward() inside forward")
        unique = {id(tensor): tensor for tensor in find_tensors([output, [value for _, _, value in self.assigned]])}
        return output, list(unique.values())

    def gradients(
        self, outputs: list[Tensor], inputs: list[Tensor], tangents: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of ``outputs`` as training code asks for them: outside of ``torch.autocast``."""
        off = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
        with off[0], off[1]:
            return torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)

    def _check_containers(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> None:
        """The trace gets its own lists and dictionaries, so that a change to one would be lost."""
        now, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(one is not other for one, other in zip(now, leaves, strict=True)):
            raise CaptureError("forward changes a container among its inputs", reason="an input container is changed")


def _host_random_state() -> tuple[Any, ...]:
    """State of Python's and NumPy's global generators, comparable by ``==``."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, tuple(keys.tolist()), *rest


def _restore_host_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    if len(state) > 1:
        sys.modules["numpy"].random.set_state(state[1:])
