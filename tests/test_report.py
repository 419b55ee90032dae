from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt import tables
from fxckpt.plan import Graph, Node, Plan, Program, Segment, SegmentProgram, Step, Timeline
from fxckpt.report import Report, build_report
from fxckpt.tables import chart, counted, rounded, short_op, short_source, span_name, unit_for
from tests.conftest import Golden

MIB = 2**20
LAYERS = 6
OPS = ("aten.addmm.default", "aten.view.default", "aten.relu.default", "aten.native_dropout.default")


def example(budget_mib: int = 60, **options: object) -> Report:
    """Six layers of [linear, view, relu, dropout] of 1, 0, 2 and 3 MiB; layers 0, 1, 2 and 4 keep the linear only."""
    nodes = [Node("x", "input", "input", storages=(0,), allocates=(0,))]
    sizes = [MIB]
    for layer in range(LAYERS):
        for index, op in enumerate(OPS):
            view = "view" in op
            storage = len(sizes) - 1 if view else len(sizes)
            if not view:
                sizes.append((1, 0, 2, 3)[index] * MIB)
            node = Node(
                f"{op.split('.')[1]}_{layer}", op, "forward", inputs=(len(nodes) - 1,), storages=(storage,),
                allocates=() if view else (storage,),
                seconds=0.0 if view else 0.01 * (index + 1), view=view, random="dropout" in op,
                recomputable=not (layer == 5 and "relu" in op), module=f"blocks.{layer}.{op.split('.')[1]}",
                source=f"net.py:{10 + index}",
            )  # fmt: skip
            nodes.append(node)
    forward = tuple(range(1, len(nodes)))
    nodes += [Node(f"grad_{value}", "aten.mul.Tensor", "backward", inputs=(value,)) for value in forward]
    graph = Graph(
        tuple(nodes), forward, (), (), tuple(sizes), outputs=(forward[-1],), fixed_bytes=10 * MIB, state_bytes=MIB
    )
    programs, segments = [], []
    for layer in range(LAYERS):
        linear, view, relu, drop = range(1 + 4 * layer, 5 + 4 * layer)
        lean = layer in (0, 1, 2, 4)
        again = (Step("run", view), Step("run", relu), Step("replay", drop)) if lean else ()
        saved = (linear,) if lean else (linear, relu, drop)
        name = f"segment_{layer}"
        programs.append(
            SegmentProgram(
                name, inputs=(linear - 1,), outputs=(drop,), forward=(), saved=saved,
                states=(drop,) if lean else (), tangents=(), expected=(),
                backward=(*again, Step("run", len(forward) + linear)), gradients=(),
            )
        )  # fmt: skip
        segments.append(Segment(4 * layer, 4 * layer + 4, name=name))
    up = [10 + 5 * index for index in range(8)]
    down = [52, 58, 50, 40, 30, 20, 15, 12]
    labels = [(min(i, 5), "forward", "n") for i in range(8)] + [(max(5 - i, 0), "backward", "n") for i in range(8)]
    timeline = Timeline(
        tuple(count * MIB for count in up + down), 58 * MIB, 9, 4, "backward", ("fixed", "kept", "recomputed", "none"),
        (10 * MIB, 25 * MIB + 1, 23 * MIB - 1, 0), tuple(labels), 4 * 0.07, 3.0,
        tuple(count * MIB for count in (20, 30, 40, 50, 58, 52)),
    )  # fmt: skip
    plan = Plan("dp", tuple(segments), budget_bytes=budget_mib * MIB, peak_bytes=58 * MIB, extra_seconds=0.28)
    plain = dataclasses.replace(timeline, peak_bytes=100 * MIB)
    return build_report(
        graph, plan, Program(tuple(programs)), timeline, plain, title="Net, 8x16 float32, train", **options
    )


def test_golden_report(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    report = dataclasses.replace(
        example(
            min_peak_bytes=40 * MIB,
            bound_seconds=0.25,
            pass_seconds=(("capture", 1.5), ("dp", 0.25)),
            remarks=[
                "head was not captured: it calls .item() (net.py:30), so that its values stay " + "as they are " * 5
            ],
            regions=("blocks", "tail"),
        ),
        version="0.0.0",
    )
    golden.check("report.txt", report.render())
    golden.check("report_ascii.txt", report.render(ascii=True))
    golden.check("report.md", report.to_markdown())
    golden.check("report.html", report._repr_html_())


def test_report_is_deterministic_narrow_and_without_trailing_blanks() -> None:
    text = example().render()
    assert text == example().render()
    for line in text.split("\n"):
        assert len(line) <= 100
        assert line == line.rstrip()


def test_ascii_when_the_terminal_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("utf-8", False), ("latin-1", True), (None, True)):
        stream = io.StringIO() if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        text = str(example())
        monkeypatch.undo()
        assert text.isascii() == expected


def cells(text: str) -> tuple[list[list[str]], list[str]]:
    """The lines of the table of segments, split at double blanks, and its total line."""
    lines = text.split("\n")
    rules = [index for index, line in enumerate(lines) if line == "-" * 100]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[rules[0] + 1 : rules[1]]]
    return rows, re.split(r"\s{2,}", lines[rules[1] + 1].strip())


def test_every_printed_column_adds_up() -> None:
    report = example()
    rows, total = cells(report.render())
    assert [row[0] for row in rows] == ["0-2", "3", "4", "5"]
    assert sum(int(row[2]) for row in rows) == int(total[1]) == 18
    for column in (3, 4):
        assert sum(round(1000 * float(row[column])) for row in rows) == round(1000 * float(total[column - 1]))
    assert max(float(row[5]) for row in rows) == float(total[4])
    assert sum(round(100 * float(row[7])) for row in rows) == round(100 * float(total[-1]))
    assert float(total[-1]) == pytest.approx(100 * report.overhead, abs=0.005)
    assert float(total[2]) == 6 * 6  # MiB that the plain step keeps
    assert float(total[3]) == 4 * (1 + 1) + 2 * 6  # linears and generator states; two layers whole


def test_printed_breakdown_adds_up_to_the_printed_peak() -> None:
    text = example().render()
    peak = re.search(r"^Peak ([\d.]+) MiB", text, re.M)
    assert peak is not None
    parts = text[peak.end() :].split("\n\n")[0].split("\n", 1)[1]
    counts = [float(number) for number in re.findall(r"[\d.]+", parts)]
    assert len(counts) == 3  # the empty part is not printed
    assert round(1000 * sum(counts)) == round(1000 * float(peak.group(1)))


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (0, "no budget was given"),
        (60, "fits the budget of 60.00 MiB, 2.00 MiB to spare"),
        (64 * 1024, "58.00 MiB   fits the budget of 64.00 GiB, 63.94 GiB to spare"),
        (50, "DOES NOT FIT the budget of 50.00 MiB, 8.00 MiB too much"),
    ],
)
def test_verdict_comes_first(budget: int, text: str) -> None:
    report = example(budget)
    assert text in report.render().split("\n")[2]
    assert report.fits == (budget != 50)


def test_gap_to_the_bound() -> None:
    assert example().gap is None
    assert example(bound_seconds=0.25).gap == pytest.approx(0.01)
    assert example(bound_seconds=9.0).gap == 0.0
    assert "at most 1.0% above the least" in example(bound_seconds=0.25).render()


def test_report_as_data() -> None:
    data = example(pass_seconds=[("dp", 0.5)]).to_dict()
    assert data == json.loads(example(pass_seconds=[("dp", 0.5)]).to_json())
    assert data["fits"] is True
    assert data["rows"][0]["recomputed"] == ["relu", "dropout"]
    assert sum(count for _, count in data["peak_parts"]) == data["peak_bytes"]
    assert len(data["timeline"]) == 16
    assert data["forward_steps"] == 8


def test_reasons_for_kept_values() -> None:
    reasons = {value.name: value.reason for value in example().kept}
    assert "output of the model" in reasons["native_dropout_5"]
    assert "later segments" in reasons["native_dropout_3"]
    assert "may have changed" in reasons["relu_5"]


def test_segments_without_modules_or_recomputation_are_printable() -> None:
    graph = Graph(
        (
            Node("x", "input", "input", storages=(0,), allocates=(0,)),
            Node("y", "aten.exp.default", "forward", inputs=(0,), storages=(1,), allocates=(1,)),
        ),
        (1,), (), (), (4, 4), (1,),
    )  # fmt: skip
    segment = SegmentProgram("s", (0,), (1,), (Step("run", 1),), (), (), (), expected=(), backward=(), gradients=())
    program = Program((segment,))
    timeline = Timeline((8,), 8, 0, 0, "forward", ("kept",), (8,))
    text = build_report(graph, Plan("none", (Segment(0, 1),)), program, timeline, timeline, title="f").render()
    assert re.search(r"0  model +1 +0.000 +0.000 +0.000  - +0.00  < peak", text)


@given(st.lists(st.integers(0, 2**40)), st.sampled_from([1, 1024, MIB, 2**30]), st.integers(0, 4))
def test_rounded_values_add_up_and_are_off_by_less_than_a_digit(values: list[int], unit: int, decimals: int) -> None:
    texts, total = rounded(values, unit, decimals)
    scale = 10**decimals
    assert sum(round(float(text) * scale) for text in texts) == round(float(total) * scale)
    for value, text in zip(values, texts, strict=True):
        assert abs(value / unit - float(text)) <= 1.0001 / scale


def test_one_unit_for_a_column() -> None:
    assert unit_for([5, 3 * MIB]) == ("MiB", MIB)
    assert unit_for([]) == ("B", 1)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten.native_batch_norm.default", "bn"),
        ("aten._native_batch_norm_legit.no_stats", "bn"),
        ("aten.native_layer_norm.default", "layer_norm"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten.convolution.default", "conv"),
        ("aten._softmax.default", "softmax"),
        ("mylib.kernel.default", "kernel"),
        ("f", "f"),
    ],
)
def test_short_names_of_operators(op: str, name: str) -> None:
    assert short_op(op) == name


def test_sources_are_short_and_the_same_on_every_machine() -> None:
    assert short_source("/usr/lib/python3/site-packages/timm/layers/a.py:3") == "timm/layers/a.py:3"
    assert short_source(f"{Path.cwd()}/nets/b.py:4") == "nets/b.py:4"
    assert short_source("/elsewhere/c.py:5") == "/elsewhere/c.py:5"
    assert short_source("") == ""


def test_counted_names_fit() -> None:
    names = ["relu"] * 9 + ["conv"] * 3 + ["exp"]
    assert counted(names, 40) == "relu x9, conv x3, exp"
    assert counted(names, 18) == "relu x9, +4"
    assert counted(names, 3) == "13 ops"
    assert counted([], 3) == "-"


def test_names_of_spans_fit() -> None:
    assert span_name("conv1", "conv1", 30) == "conv1"
    assert span_name("layer1.0.conv1", "layer1.2.relu", 40) == "layer1.0.conv1 .. layer1.2.relu"
    assert span_name("layer1.0.conv1", "layer1.2.relu", 20) == "layer1.0 .. 2"
    assert span_name("layer1.0.conv1", "layer2.2.relu", 20) == "layer1 .. layer2"
    assert span_name("encoder.a", "encoder", 10) == "encoder"
    assert span_name("a_very_long_name", "a_very_long_name", 8) == "..g_name"


def test_chart_keeps_every_peak_and_shades_what_is_fixed() -> None:
    totals = [MIB] * 500 + [8 * MIB] + [2 * MIB] * 499
    text = chart(totals, MIB, 500, width=60, height=4, ascii=True)
    lines = text.split("\n")
    assert lines[0].count("#") == 1
    assert lines[3].count(":") == 60 - len("8.00 MiB | ")
    assert all(len(line) <= 60 for line in lines)
    assert lines[-1].strip().startswith("forward")
    assert chart([], 0, 0, width=60) == ""
    assert chart([MIB, 2 * MIB], 0, 1, width=60).count("\n") == 9
    assert tables.shades(True) == ("#", ":")
