from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxckpt.cli import main
from fxckpt.cli_models import Setup, parse_budget, parse_input, resolve
from fxckpt.errors import InvalidArgumentError
from fxckpt.plan import Plan
from fxckpt.units import GIB, MIB

CHAIN = "tests.test_cli:chain"
BASE = [CHAIN, "--kwargs", '{"depth": 8}', "--input", "256x64"]


def chain(depth: int = 4, width: int = 64, dropout: float = 0.1) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.Sequential(*layers)


CALLS = [0]


class Unequal(nn.Module):
    """Another forward at each call, steered from where no capture looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return self.layer(x) * CALLS[0]


INSTANCE = chain(1)


def keywords() -> dict[str, Any]:
    return {"input": torch.ones(256, 64)}


def both() -> tuple[tuple[Tensor], dict[str, Any]]:
    return (torch.ones(2, 64),), {}


def one() -> Tensor:
    return torch.ones(2, 64)


def not_a_model() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("out of luck")


def mean(output: Tensor) -> Tensor:
    return output.mean()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2", 2 * GIB),
        ("0.5GiB", GIB // 2),
        ("800 MiB", 800 * MIB),
        ("3kib", 3 * 1024),
        ("7B", 7),
        ("1e-3", GIB // 1000),
    ],
)
def test_budgets_in_bytes(text: str, count: int) -> None:
    assert parse_budget(text).bytes == pytest.approx(count, abs=1)
    assert parse_budget(text).gib(lambda: 1 / 0) == pytest.approx(count / GIB)  # type: ignore[arg-type,return-value]


def test_budget_as_a_share_of_the_plain_peak() -> None:
    assert parse_budget("60%").gib(lambda: 10 * GIB) == pytest.approx(6)


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "8GB", "eight", "1.2.3"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="budget"):
        parse_budget(text)


def test_inputs() -> None:
    assert parse_input("2x3").shape == (2, 3)
    assert parse_input("2,3:bf16").dtype == torch.bfloat16
    ids = parse_input("1x500:int64:7")
    assert ids.dtype == torch.int64
    assert set(ids.flatten().tolist()) == set(range(7))
    assert int(parse_input("500:long").max()) == 1
    assert parse_input("4:bool").dtype == torch.bool
    assert parse_input("4:complex64").is_complex()


@pytest.mark.parametrize("text", ["", "x", "2x", "2x3:float99", "2x3:nn", "-2"])
def test_bad_inputs(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="input"):
        parse_input(text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain", "not of the form"),
        (":chain", "not of the form"),
        ("no_such_module:chain", "cannot import"),
        ("tests.test_cli:no_such_name", "has no 'no_such_name'"),
    ],
)
def test_names_that_do_not_exist(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        resolve(spec, "model")


def test_a_missing_model_library_comes_with_its_remedy() -> None:
    with pytest.raises(InvalidArgumentError, match=r"pip install 'fxckpt\[models\]'"):
        resolve("torchvision.no_such_module:resnet50", "model")


@pytest.mark.parametrize(("name", "args", "kwargs"), [("keywords", 0, 1), ("both", 1, 0), ("one", 1, 0)])
def test_input_functions(name: str, args: int, kwargs: int) -> None:
    setup = Setup.load("tests.test_cli:INSTANCE", input_fn=f"tests.test_cli:{name}")
    assert (len(setup.args), len(setup.kwargs)) == (args, kwargs)
    assert isinstance(setup.model, nn.Sequential)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_kwargs": "{"}, "not a JSON object"),
        ({"model_kwargs": "[1]"}, "not a JSON object"),
        ({"model_kwargs": '{"no_such": 1}'}, "could not be built"),
        ({"inputs": ()}, "no inputs"),
        ({"input_fn": "tests.test_cli:one"}, "exclude each other"),
        ({"device": "nonsense"}, "not available"),
        ({"optimizer": "NoSuch"}, "adamw"),
    ],
)
def test_bad_setups(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Setup.load(CHAIN, **{"inputs": ("2x64",), **options})


@pytest.mark.parametrize("spec", ["tests.test_cli:broken", "tests.test_cli:not_a_model"])
def test_bad_models(spec: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"could not be built|not a torch\.nn\.Module"):
        Setup.load(spec, inputs=("2x64",))


def test_optimizer_comes_with_its_state_and_leaves_the_weights() -> None:
    torch.manual_seed(0)
    plain = chain()
    setup = Setup.load(CHAIN, inputs=("2x64",), optimizer="adamw")
    assert setup.optimizer is not None
    assert len(setup.optimizer.state) == 8
    for ours, theirs in zip(setup.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_plan_prints_the_report_and_writes_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", *BASE, "--budget", "70%", "-o", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fxckpt ")
    assert "Predicted peak" in out
    assert err == ""
    plan = Plan.from_json(file.read_text())
    assert plan.strategy == "dp"
    assert plan.peak_bytes <= plan.budget_bytes


def test_plan_as_json_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BASE, "--strategy", "sqrtn", "--output-format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["strategy"] == "sqrtn"
    assert sum(count for _, count in data["peak_parts"]) == data["peak_bytes"]
    assert main(["plan", *BASE, "--strategy", "none", "--output-format", "markdown"]) == 0
    assert "| total" in capsys.readouterr().out
    assert main(["plan", *BASE, "--strategy", "none", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_times_of_another_device_and_a_choice_of_modules(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for cost in ("cpu", "a100"):
        assert main(["plan", *BASE, "--strategy", "sqrtn", "--cost", cost, "--output-format", "json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["plain_seconds"])
    assert seconds[0] > seconds[1]
    assert main(["plan", *BASE, "--strategy", "sqrtn", "--leave", "0"]) == 0
    assert "in regions" in capsys.readouterr().out


def test_an_infeasible_budget_is_answered_with_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BASE, "--budget", "1KiB"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "BudgetInfeasibleError" in err
    assert "smallest" in err


def test_inputs_that_the_model_cannot_run_on_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CHAIN, "--input", "2x3", "--budget", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "fails with the example inputs" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "nowhere:model", "--input", "2x2", "--budget", "1"],
        ["plan", *BASE, "--budget", "-1"],
        ["plan", *BASE],
        ["plan", *BASE, "--budget", "1", "--cost", "abacus"],
        ["plan", *BASE, "--budget", "1", "--leave", "no.such.module"],
        ["plan", *BASE, "--strategy", "none", "-o", "/no/such/folder/plan.json"],
        ["check", *BASE, "--plan", "/no/such/plan.json"],
    ],
)
def test_wrong_use(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fxckpt: ")


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["plan"], ["plan", *BASE, "--strategy", "magic"]])
def test_wrong_use_that_argparse_sees(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--budget", "75%"],
        ["--budget", "80%", "--optimizer", "AdamW", "--loss", "tests.test_cli:mean"],
        ["--strategy", "sqrtn"],
        ["--budget", "80%", "--amp", "bf16", "--kwargs", '{"depth": 4, "width": 256}', "--input", "1024x256"],
    ],
)
def test_check_passes(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    base = [CHAIN] if "--input" in options else BASE
    assert main(["check", *base, *options, "--output-format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["equal"]
    assert data["plain_loss"] == data["planned_loss"]
    assert data["measured"] == pytest.approx(data["predicted"], rel=0.02)


def test_check_of_a_saved_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, result = tmp_path / "plan.json", tmp_path / "result.json"
    assert main(["plan", *BASE, "--budget", "75%", "-q", "-o", str(file)]) == 0
    assert main(["check", *BASE, "--plan", str(file), "-o", str(result)]) == 0
    assert "equal         yes" in capsys.readouterr().out
    assert json.loads(result.read_text())["passed"]
    assert main(["check", CHAIN, "--input", "256x64", "--plan", str(file)]) == 2
    assert "PlanMismatchError" in capsys.readouterr().err


def test_check_says_no_when_the_steps_differ(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "tests.test_cli:Unequal", "--input", "64x8", "--strategy", "none"]
    assert main(argv) == 1
    assert "gradient of layer.weight" in capsys.readouterr().out


def test_module_and_script_are_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "fxckpt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fxckpt ")
