"""Data-parallel and sharded training of planned models: two gloo processes, gradients equal to the same run without.

One pair of processes runs every scenario and stores, for each, the names of what differs; the tests read them.
"""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxckpt import auto_checkpoint
from tests import harness
from tests.planning import STRATEGIES

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]

WORLD = 2


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 24), nn.Linear(24, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class LanguageModel(nn.Module):
    """Embedding and head share a weight; a buffer counts; one layer is used by odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(12, 12)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor, spare: bool = False) -> torch.Tensor:
        self.steps += 1
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        if spare:
            h = self.spare(h)
        logits: torch.Tensor = self.head(self.norm(h))
        return logits


def _ids(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def _state(model: nn.Module) -> dict[str, Any]:
    def local(tensor: torch.Tensor | None) -> Any:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    gradients = {f"gradient {name}": local(p.grad) for name, p in model.named_parameters()}
    values = {name: local(value) for name, value in model.state_dict().items()}
    return harness.freeze({**gradients, **values})


def _steps(model: nn.Module, rank: int, spare: Callable[[int], bool], no_sync: bool = False) -> dict[str, Any]:
    """Train three steps and return all that is left, by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    harness.seed_all(rank)
    seen: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        if no_sync:
            with model.no_sync():  # type: ignore[operator]
                model(_ids(rank, 50 + step), spare(step)).square().mean().backward()
        loss = model(_ids(rank, step), spare(step)).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        seen[f"step {step}"] = {"loss": harness.freeze(loss), **_state(model)}
    return seen


def _ddp(rank: int, way: str, spare: str, no_sync: bool = False, **options: Any) -> list[str]:
    uses: dict[str, Callable[[int], bool]] = {"always": lambda _: True, "odd": lambda step: step % 2 == 1}
    runs = []
    for make_planned in (None, STRATEGIES[way]):
        harness.seed_all()
        model: nn.Module = LanguageModel()
        if make_planned:
            model = make_planned(model, (_ids(rank, 0), uses[spare](0)), {})
        runs.append(_steps(DistributedDataParallel(model, bucket_cap_mb=0.001, **options), rank, uses[spare], no_sync))
    return list(harness.differences(*runs))


def _fsdp(rank: int, way: str) -> list[str]:
    mesh = init_device_mesh("cpu", (WORLD,))
    runs = []
    for planned in (False, True):
        harness.seed_all()
        model = LanguageModel()
        for index, layer in enumerate(model.layers):
            if planned:
                x = torch.randn(3, 7, 12, requires_grad=True)
                model.layers[index] = STRATEGIES[way](layer, (x,), {})
            fully_shard(model.layers[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
        runs.append({**_steps(model, rank, lambda _: True), "keys": list(get_model_state_dict(model))})
    return list(harness.differences(*runs))


def _checkpoint_keys(rank: int, folder: str) -> list[str]:
    """A distributed checkpoint of the planned model loads into the plain one, under DDP and alone."""
    harness.seed_all()
    plain, target = LanguageModel(), LanguageModel()
    planned = auto_checkpoint(plain, _ids(rank, 0), strategy="sqrtn")
    wrapped = DistributedDataParallel(planned)
    wrapped(_ids(rank, 0), True).sum().backward()
    keys = [list(get_model_state_dict(model)) for model in (plain, planned, wrapped)]
    found = [f"keys {entry}" for entry in keys[1:] if entry != keys[0]]
    dcp.save(get_model_state_dict(wrapped), checkpoint_id=folder)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=folder)
    return found + list(harness.differences(harness.freeze(plain.state_dict()), harness.freeze(state)))


SCENARIOS: dict[str, tuple[Callable[..., list[str]], dict[str, Any]]] = {
    **{
        f"ddp {way}, find_unused_parameters={find}": (
            _ddp,
            {"way": way, "spare": "odd" if find else "always", "find_unused_parameters": find},
        )
        for way in ("dp", "sqrtn", "recompute", "lazy")
        for find in (False, True)
    },
    "ddp dp, static_graph": (_ddp, {"way": "dp", "spare": "always", "static_graph": True}),
    "ddp lazy, static_graph": (_ddp, {"way": "lazy", "spare": "always", "static_graph": True}),
    "ddp dp, no_sync": (_ddp, {"way": "dp", "spare": "always", "no_sync": True}),
    "ddp recompute, gradients are views of buckets": (
        _ddp,
        {"way": "recompute", "spare": "always", "gradient_as_bucket_view": True},
    ),
    "fsdp dp": (_fsdp, {"way": "dp"}),
    "fsdp recompute": (_fsdp, {"way": "recompute"}),
    "fsdp lazy": (_fsdp, {"way": "lazy"}),
    "checkpoint keys": (_checkpoint_keys, {}),
}


def _worker(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {}
    for name, (run, options) in SCENARIOS.items():
        if run is _checkpoint_keys:
            options = {"folder": f"{folder}/checkpoint"}
        try:
            results[name] = run(rank, **options)
        except Exception:  # one scenario may not hide the others
            results[name] = [traceback.format_exc()]
        dist.barrier()
    Path(folder, f"results{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (folder,), nprocs=WORLD)
        return [json.loads(Path(folder, f"results{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_the_run_without_fxckpt(results: list[dict[str, list[str]]], scenario: str) -> None:
    for rank in range(WORLD):
        assert results[rank][scenario] == [], "\n".join(results[rank][scenario])
