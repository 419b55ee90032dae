from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fxckpt._torch import FakeTensorMode
from fxckpt.device import DEVICES, Device, estimate_device, find_device, is_view, op_seconds, op_work
from fxckpt.errors import InvalidArgumentError

aten = torch.ops.aten
SIMPLE = Device("simple", flops=100.0, half_flops=1000.0, bandwidth=10.0, launch_seconds=1.0)


def test_devices_by_name_and_by_themselves() -> None:
    assert find_device("h100") is DEVICES["h100"]
    assert find_device(None) is find_device(torch.device("cpu")) is DEVICES["cpu"]
    assert find_device(SIMPLE) is SIMPLE
    with pytest.raises(InvalidArgumentError, match=r"tpu.*a100"):
        find_device("tpu")


@pytest.mark.parametrize(
    ("name", "capability", "processors", "clock", "memory_clock", "bits"),
    [("a100", (8, 0), 108, 1_410_000, 1_593_000, 5120), ("h100", (9, 0), 132, 1_980_000, 2_619_000, 5120)],
)
def test_estimates_from_properties_come_near_the_datasheet(
    name: str, capability: tuple[int, int], processors: int, clock: int, memory_clock: int, bits: int
) -> None:
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], multi_processor_count=processors, clock_rate=clock,
        memory_clock_rate=memory_clock, memory_bus_width=bits,
    )  # fmt: skip
    found, known = estimate_device(properties), DEVICES[name]
    assert found.flops == pytest.approx(known.flops, rel=0.02)
    assert found.half_flops == pytest.approx(known.half_flops, rel=0.1)
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.03)


def test_an_estimate_without_clocks_is_an_a100() -> None:
    properties = SimpleNamespace(name="other", major=12, minor=0, multi_processor_count=170)
    a100 = DEVICES["a100"]
    found = estimate_device(properties)
    assert (found.flops, found.half_flops, found.bandwidth) == (a100.flops, a100.half_flops, a100.bandwidth)


@pytest.mark.gpu
def test_the_installed_device_is_known() -> None:
    found = find_device(torch.device("cuda"))
    assert found.flops > 1e12
    assert found.bandwidth > 1e11


@pytest.mark.parametrize("fake", [False, True])
def test_work_of_a_matrix_product(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad():
        a, b = torch.ones(2, 3), torch.ones(3, 5)
        assert op_work(aten.mm.default, (a, b), {}, a @ b) == (2 * 2 * 3 * 5, 4 * (6 + 15 + 10))


def test_broadcast_dimensions_are_read_once() -> None:
    row = torch.ones(1, 4).expand(3, 4)
    assert op_work(aten.add.Tensor, (row, row), {}, torch.ones(3, 4)) == (0, 4 * (4 + 4 + 12))
    assert op_work(aten.add.Tensor, (torch.ones(0), 1), {}, torch.ones(0)) == (0, 0)


@pytest.mark.parametrize("func", [aten.view.default, aten.t.default, aten.empty_like.default, operator.getitem])
def test_what_moves_no_data_is_free(func: object) -> None:
    x: Tensor = torch.ones(2, 2)
    assert is_view(func)
    assert op_work(func, (x,), {}, x) == (0, 0)
    assert op_seconds(func, (x,), {}, x, SIMPLE) == 0.0


def test_seconds_are_the_longer_of_compute_and_traffic() -> None:
    a = torch.ones(10, 10)
    flops, moved = 2 * 10**3, 4 * 300
    assert op_seconds(aten.mm.default, (a, a), {}, a @ a, SIMPLE) == 1 + moved / 10
    fast = Device("fast", flops=100.0, half_flops=1000.0, bandwidth=1e9, launch_seconds=1.0)
    assert op_seconds(aten.mm.default, (a, a), {}, a @ a, fast) == 1 + flops / 100
    half = a.bfloat16()
    assert op_seconds(aten.mm.default, (half, half), {}, half @ half, fast) == 1 + flops / 1000
    assert not is_view(aten.mm.default)
