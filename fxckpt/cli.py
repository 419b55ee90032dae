"""The command line: ``fxckpt plan``, ``fxckpt check``, ``fxckpt demo``.

Reports go to stdout, progress and errors to stderr. Exit status: 0 fine, 1 the answer is no (nothing fits the budget,
the planned step differs), 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxckpt._version import __version__
from fxckpt.errors import FxckptError, InvalidArgumentError, PlanMismatchError

__all__ = ["main"]

STRATEGIES = ("dp", "sqrtn", "none")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with ``argv`` (default: that of the process) and return the exit status."""
    options = _parser().parse_args(argv)
    _log_to_stderr(getattr(options, "verbose", 0))
    try:
        return int(options.run(options))
    except (InvalidArgumentError, PlanMismatchError) as error:
        print(f"fxckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except FxckptError as error:
        print(f"fxckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxckpt", description="Activation checkpointing for PyTorch under a memory budget."
    )
    parser.add_argument("--version", action="version", version=f"fxckpt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plan a training step and print the report", epilog=_EXAMPLE)
    _add_model_options(plan)
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan as JSON")
    plan.set_defaults(run=_plan)
    check = commands.add_parser(
        "check", help="run one plain and one planned step and compare them bit for bit", epilog=_EXAMPLE
    )
    _add_model_options(check)
    check.add_argument("--plan", type=Path, metavar="FILE", help="check this saved plan instead of making one")
    loss = "maps the output to a scalar (default: the output's own loss, else a sum of squares)"
    check.add_argument("--loss", metavar="MODULE:FN", help=loss)
    check.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result as JSON")
    check.set_defaults(run=_check)
    demo = commands.add_parser("demo", help="train ResNet-50 at half of its activation memory, beside the plain run")
    demo.add_argument("--data", type=Path, metavar="DIR", help="folder that holds CIFAR-10 as 'cifar-10-batches-py' "
                      "(default: synthetic images of the same shape)")  # fmt: skip
    demo.add_argument("--steps", type=int, default=3, help="training steps (default: %(default)s)")
    demo.add_argument("--batch", type=int, default=256, help="images in a batch (default: %(default)s)")
    _add_common_options(demo)
    demo.set_defaults(run=_demo)
    return parser


_EXAMPLE = "Example: %(prog)s torchvision.models:resnet50 --input 8x3x224x224 --budget 60%%"


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="package.module:callable that makes the model, or package.module:instance")
    add("--kwargs", default="{}", metavar="JSON", help="keyword arguments of the callable")
    add("--input", action="append", default=[], metavar="SHAPE[:DTYPE[:HIGH]]",
        help="one positional argument, e.g. 8x3x224x224 or 1x512:int64:50257; repeat for more")  # fmt: skip
    add("--input-fn", metavar="MODULE:FN", help="returns args, kwargs (a dict) or (args, kwargs) of forward")
    add("--budget", metavar="N", help="peak of the whole step: GiB, or with a unit (800MiB), or a share of the plain "
        "step's peak (60%%)")  # fmt: skip
    add("--reserve", type=float, default=0.0, metavar="GIB", help="part of the budget to leave to others")
    add("--strategy", choices=STRATEGIES, default="dp", help="default: %(default)s")
    add("--cost", default="roofline", metavar="NAME", help="times to plan by: roofline (of the device), measure (each "
        "operator), or those of another device, e.g. a100 (default: %(default)s)")  # fmt: skip
    add("--leave", action="append", default=[], metavar="PATTERN", help="modules that stay Python; repeat for more")
    add("--regions", action="append", default=[], metavar="PATTERN", help="modules to plan, each for itself; repeat "
        "for more")  # fmt: skip
    add("--optimizer", metavar="NAME", help="of torch.optim, e.g. AdamW; its state counts in the budget")
    add("--amp", choices=("bf16", "fp16"), help="run forward under autocast")
    add("--seed", type=int, default=0, help="for weights, inputs and dropout (default: %(default)s)")
    _add_common_options(parser)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cpu", help="default: %(default)s")
    add("--output-format", choices=("text", "json", "markdown"), default="text", help="default: %(default)s")
    add("-q", "--quiet", action="store_true", help="print no report, only set the exit status")
    add("-v", "--verbose", action="count", default=0, help="log progress to stderr; twice for more")


def _log_to_stderr(verbose: int) -> None:
    logger = logging.getLogger("fxckpt")
    if verbose and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


def _setup(options: argparse.Namespace) -> Any:
    from fxckpt.cli_models import Setup

    return Setup.load(
        options.model,
        model_kwargs=options.kwargs,
        inputs=tuple(options.input),
        input_fn=options.input_fn,
        loss=getattr(options, "loss", None),
        optimizer=options.optimizer,
        device=options.device,
        amp=options.amp,
        seed=options.seed,
    )


def _planned(setup: Any, options: argparse.Namespace) -> Any:
    """The model after ``auto_checkpoint`` with the options of the command line."""
    from fxckpt.api import auto_checkpoint
    from fxckpt.cli_models import parse_budget
    from fxckpt.plan import Plan

    def planned(**how: Any) -> Any:
        with setup.context():
            return auto_checkpoint(
                setup.model, *setup.args, example_kwargs=setup.kwargs, optimizer=setup.optimizer, cost=options.cost,
                leave=tuple(options.leave), regions=tuple(options.regions), **how,
            )  # fmt: skip

    saved = getattr(options, "plan", None)
    if saved is not None:
        try:
            return planned(plan=Plan.from_json(saved.read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidArgumentError(f"cannot read the plan: {error}") from error
    budget_gb = None
    if options.budget is not None:
        budget = parse_budget(options.budget)
        budget_gb = budget.gib(lambda: int(planned(strategy="none").report.plain_peak_bytes))
    elif options.strategy == "dp" and setup.device.type == "cpu":
        raise InvalidArgumentError("strategy 'dp' needs a budget: --budget N in GiB, or e.g. --budget 60%")
    return planned(budget_gb=budget_gb, strategy=options.strategy, reserve_gb=options.reserve)


def _plan(options: argparse.Namespace) -> int:
    from fxckpt.api import get_plan, get_report

    model = _planned(_setup(options), options)
    report = get_report(model)
    if options.output is not None:
        _write(options.output, get_plan(model).to_json())
    if not options.quiet:
        shapes = {"text": report.__str__, "json": report.to_json, "markdown": report.to_markdown}
        print(shapes[options.output_format]())
    return 0


def _check(options: argparse.Namespace) -> int:
    from fxckpt.api import get_report
    from fxckpt.check import CheckResult
    from fxckpt.measure import compare_steps

    setup = _setup(options)
    planned = _planned(setup, options)
    found = compare_steps(
        setup.model, planned, setup.args, setup.kwargs, setup.loss, options.seed,
        context=setup.context, measure=True, held=setup.optimizer,
    )  # fmt: skip
    result = CheckResult.of(found, get_report(planned))
    if options.output is not None:
        _write(options.output, json.dumps(result.to_dict(), indent=2))
    if not options.quiet:
        print(result.render(options.output_format))
    return 0 if result.passed else 1


def _demo(options: argparse.Namespace) -> int:
    from fxckpt.demo import run_demo

    result = run_demo(
        data=options.data, steps=options.steps, batch=options.batch, device=options.device,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    if not options.quiet:
        print(result.render(options.output_format))
    return 0 if result.passed else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error}") from error
