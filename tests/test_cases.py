"""Every hostile case is bit-equal to eager under every strategy."""

from __future__ import annotations

import pytest

from tests import cases
from tests.harness import compare
from tests.planning import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WAYS = ("dp", "lazy", "recompute", "recompute whole")  # "lazy" is "sqrtn", planned at the first call


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("name", cases.names())
def test_case_equals_eager(name: str, strategy: str) -> None:
    case = cases.load(name)
    assert compare(case.build, case.loss, make_planned=STRATEGIES[strategy], **case.options()) == []
