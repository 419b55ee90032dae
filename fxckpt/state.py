"""Tensors and plain attributes of a module tree: collected, swapped for fakes during a trace, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxckpt.errors import CaptureError
from fxckpt.snapshot import RandomState

__all__ = [
    "PURE_HOOKS",
    "HeldTensor",
    "ModuleState",
    "contains_tensor",
    "find_tensors",
    "has_hooks",
    "silent_hooks",
    "storage_bytes",
    "unchanged",
]

PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
INTERNAL = frozenset(vars(nn.Module()))
# Hooks that only compute, or hand tensors to the forward that put them there: they are traced like any other code.
# Hugging Face installs its own at the first call that asks for hidden states, attentions or router logits.
PURE_HOOKS = ("torch.nn.utils", "transformers.utils.output_capturing")
INSTALLED = "_output_capturing_hooks_installed"


@dataclass(slots=True)
class HeldTensor:
    """A tensor of the module tree and every dictionary entry that holds it (several for tied weights)."""

    kind: str
    name: str
    tensor: Tensor
    places: list[tuple[Any, Any]]


@dataclass(slots=True)
class ModuleState:
    """All that a forward can read or write on a module tree.

    Attributes:
        modules: (path, module), each module once.
        tensors: parameters, buffers and tensors on plain attributes, each tensor once.
    """

    root: nn.Module
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    tensors: list[HeldTensor] = field(default_factory=list)

    @classmethod
    def collect(cls, root: nn.Module) -> ModuleState:
        """Walk ``root``.

        Raises:
            CaptureError: a tensor is of a subclass that the trace cannot follow.
        """
        state = cls(root, list(root.named_modules()))
        seen: dict[int, HeldTensor] = {}
        for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers"), ("attribute", "")):
            for path, module in state.modules:
                entries = vars(module)[table] if table else vars(module)
                for key, value in entries.items():
                    name = f"{path}.{key}" if path else key
                    if isinstance(value, Tensor):
                        state._hold(seen, kind, name, value, entries, key)
                    elif kind == "attribute" and type(value) in (list, dict) and key not in INTERNAL:
                        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
                            if isinstance(item, Tensor):
                                state._hold(seen, kind, f"{name}.{place}", item, value, place)
        return state

    def _hold(self, seen: dict[int, HeldTensor], kind: str, name: str, value: Tensor, entries: Any, key: Any) -> None:
        if id(value) in seen:
            seen[id(value)].places.append((entries, key))
            return
        if type(value) not in PLAIN_TENSORS:
            raise CaptureError(
                f"{name} is a {type(value).__name__}, which cannot be captured",
                module=name.rpartition(".")[0],
                reason=f"tensor subclass {type(value).__name__}",
            )
        held = seen[id(value)] = HeldTensor(kind, name, value, [(entries, key)])
        self.tensors.append(held)

    @contextlib.contextmanager
    def swapped(self, fakes: list[Tensor], assigned: list[tuple[str, str, Any]]) -> Iterator[None]:
        """Put ``fakes`` in the places of the tensors; afterwards restore every attribute as it was.

        What the code inside assigned to attributes is appended to ``assigned`` as (module path, name, value).

        Raises:
            CaptureError: a container attribute was changed in place, or modules were added or removed.
        """
        before = [_snapshot(module) for _, module in self.modules]
        for held, fake in zip(self.tensors, fakes, strict=True):
            for entries, key in held.places:
                entries[key] = fake
        swapped_in = {id(fake) for fake in fakes}
        try:
            yield
            for (path, module), snapshot in zip(self.modules, before, strict=True):
                assigned += [(path, key, value) for key, value in _changes(path, module, snapshot, swapped_in)]
        finally:
            for (_, module), snapshot in zip(self.modules, before, strict=True):
                _restore(module, snapshot)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run something with ``model`` and leave no trace: buffers, attributes and random streams are restored."""
    modules = list(model.modules())
    before = [_snapshot(module) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    generators = [v for module in modules for v in vars(module).values() if isinstance(v, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in generators]
    random_state = RandomState.now()
    try:
        yield
    finally:
        for module, snapshot in zip(modules, before, strict=True):
            _restore(module, snapshot)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for generator, state in states:
            generator.set_state(state)
        random_state.restore()


def has_hooks(module: nn.Module, pure: tuple[str, ...] = PURE_HOOKS) -> bool:
    """Whether calling ``module`` runs hooks other than those from the modules ``pure``, which can be traced."""
    return any(_is_users(hook, pure) for table in _hook_tables(module) for hook in table.values())


@contextlib.contextmanager
def silent_hooks(model: nn.Module) -> Iterator[None]:
    """Run something without the user's hooks on the modules of ``model``; each module still counts as hooked."""
    tables = [table for module in model.modules() for table in _hook_tables(module)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update((key, _no_hook) for key, hook in table.items() if _is_users(hook))
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update((key, hook) for key, hook in hooks.items() if key in table)


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _is_users(hook: Any, pure: tuple[str, ...] = PURE_HOOKS) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(pure)


def _no_hook(*args: Any, **kwargs: Any) -> None:
    """In the place of a hook."""


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Every entry of ``module.__dict__``; dictionaries, lists and sets also by their present contents."""
    copies = {key: _copy(value) for key, value in vars(module).items() if isinstance(value, (dict, list, set))}
    return {"entries": dict(vars(module)), "copies": copies}


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list, set) else value.copy()


def _changes(path: str, module: nn.Module, snapshot: dict[str, Any], swapped_in: set[int]) -> Iterator[tuple[str, Any]]:
    entries, copies = snapshot["entries"], snapshot["copies"]
    for key, value in vars(module).items():
        old = entries.get(key, _MISSING)
        if isinstance(module, nn.RNNBase) and key.startswith("_flat_weight"):
            continue  # its own record of its parameters, renewed whenever they change
        if key in ("_parameters", "_buffers"):
            for name, tensor in value.items():
                if tensor is not copies[key].get(name) and id(tensor) not in swapped_in:
                    yield name, tensor
        elif value is old or id(value) in swapped_in:
            if key in copies and not _same_contents(
                _without_pure(key, value), _without_pure(key, copies[key]), swapped_in
            ):
                raise CaptureError(
                    f"forward changes the container {key!r} of module {path or 'the model'!r} in place",
                    module=path,
                    reason=f"attribute {key!r} is changed in place",
                )
        elif key != INSTALLED:
            yield key, value


def _without_pure(key: str, value: Any) -> Any:
    """A table of hooks without those that a library has just put there; anything else as it is."""
    if key != "_forward_hooks" or value is None:
        return value
    return {number: hook for number, hook in value.items() if _is_users(hook)}


def _same_contents(value: Any, copy: Any, swapped_in: set[int] | None = None) -> bool:
    """Whether a container holds what it held before, apart from the fakes that stand in for tensors."""
    if len(value) != len(copy):
        return False
    if isinstance(value, set):
        return bool(value == copy)
    if isinstance(value, dict) and value.keys() != copy.keys():
        return False
    pairs = [(value[key], copy[key]) for key in value] if isinstance(value, dict) else zip(value, copy, strict=True)
    return all(a is b or id(a) in (swapped_in or ()) for a, b in pairs)


def _restore(module: nn.Module, snapshot: dict[str, Any]) -> None:
    entries = vars(module)
    for key in [key for key in entries if key not in snapshot["entries"]]:
        del entries[key]
    entries.update(snapshot["entries"])
    for key, copy in snapshot["copies"].items():
        value = entries[key]
        if not _same_contents(value, copy):
            if isinstance(value, list):
                value[:] = copy
            else:
                value.clear()
                value.update(copy)


_MISSING = object()


def find_tensors(value: Any, found: list[Tensor] | None = None, seen: set[int] | None = None) -> list[Tensor]:
    """Tensors reachable from ``value`` through containers and object attributes, modules not entered."""
    found = [] if found is None else found
    seen = set() if seen is None else seen
    if isinstance(value, (*SIMPLE, nn.Module, type)) or (callable(value) and not hasattr(value, "__dict__")):
        return found
    if id(value) in seen:
        return found
    seen.add(id(value))
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            find_tensors(item, found, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            find_tensors(item, found, seen)
    for item in () if isinstance(value, Tensor) else vars(value).values() if hasattr(value, "__dict__") else ():
        find_tensors(item, found, seen)
    for slot in () if isinstance(value, Tensor) else getattr(type(value), "__slots__", ()):
        find_tensors(getattr(value, slot, None), found, seen)
    return found


def contains_tensor(value: Any) -> bool:
    """Whether a tensor is reachable from ``value``."""
    return bool(find_tensors(value))


def storage_bytes(values: Iterable[Any]) -> int:
    """Bytes of the distinct storages among ``values``; what is no dense tensor counts nothing."""
    tensors = (value for value in values if isinstance(value, Tensor) and value.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): int(storage.nbytes()) for storage in storages}.values())
