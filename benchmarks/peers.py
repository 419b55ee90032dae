"""What else there is to save activation memory, as functions that transform a workload's model in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.counting import CountingInterpreter, WorkCounter
from benchmarks.models import Workload
from fxckpt.device import find_device

__all__ = ["Peer", "compiled", "peers"]

_MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A setting to measure.

    Attributes:
        name: for tables.
        apply: returns the model to train.
        counter: counts the work of compiled graphs, which a dispatch mode cannot see: Dynamo runs plain under one.
    """

    name: str
    apply: Callable[[Workload], nn.Module]
    counter: WorkCounter | None = None


def _checkpointed(work: Workload, every: int = 1, **options: Any) -> nn.Module:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # DenseNet goes on appending to the list that it passes.
            given = [list(value) if isinstance(value, list) else value for value in args]
            # The reentrant variant takes no keyword arguments, so they go in beforehand.
            return checkpoint(functools.partial(forward, **kwargs), *given, **options)

        return call

    for block in work.blocks[::every]:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    return work.model


def _save_matmuls(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = func._overloadpacket.__name__ if hasattr(func, "_overloadpacket") else ""
    return CheckpointPolicy.MUST_SAVE if name in _MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_save_matmuls)


def compiled(budget: float) -> Peer:
    """torch.compile with ``activation_memory_budget``: whole graph, eager kernels, min-cut partitioner."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    counter = WorkCounter(find_device("a100"))

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(_Switch(module, counter))

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )

    def apply(work: Workload) -> nn.Module:
        torch._dynamo.reset()
        model = torch.compile(work.model, backend=backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                return model(*args, **kwargs)

        return run  # type: ignore[return-value]

    return Peer(f"torch.compile budget {budget:g}", apply, counter)


class _Switch:
    """A compiled graph that counts its work while the counter is switched on."""

    def __init__(self, module: fx.GraphModule, counter: WorkCounter) -> None:
        self.module, self.counter = module, counter

    def __call__(self, *args: Any) -> Any:
        if not self.counter.active:
            return self.module(*args)
        return CountingInterpreter(self.module, self.counter).run(*args)


def peers(compile_budgets: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)) -> list[Peer]:
    """Everything that is measured beside fxckpt."""
    found = [
        Peer("checkpoint", functools.partial(_checkpointed, use_reentrant=False)),
        Peer("checkpoint reentrant", functools.partial(_checkpointed, use_reentrant=True)),
        Peer("checkpoint every 2nd", functools.partial(_checkpointed, every=2, use_reentrant=False)),
        Peer("SAC save matmuls", functools.partial(_checkpointed, use_reentrant=False, context_fn=_selective)),
    ]
    return found + [compiled(budget) for budget in compile_budgets]
