"""The shape of the code base: who imports whom, what a pass file offers, how long files and functions are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 65

# Lower may not import higher; two modules of one level may not import each other.
LEVELS = [
    {"errors", "moments", "units", "_version", "_torch", "tape"},
    {"clock", "plan", "joint", "tables", "device", "hull", "listing", "optimizer", "shapes", "snapshot"},
    {"metas", "state", "writes"},
    {
        "chain_costs",
        "constants",
        "double",
        "explain",
        "functional",
        "goal",
        "ledger",
        "overwrite",
        "measure",
        "menus",
        "objects",
        "recorder",
        "refuse",
        "replay",
        "runtime",
        "segments",
    }
    | {"signature", "template", "workspace"},
    {"places", "rehearsal", "resize"},
    {"guard", "report", "passes"},
    {"search"},
    {"decide"},
    {"pipeline", "regions"},
    {"captures", "report_regions"},
    {"planner"},
    {"model"},
    {"api"},
    {"check", "cli_models", "demo", "integrations", "viz"},
    {"cli"},
    {"__main__", "__init__"},
]
# `runtime` is what a rewritten graph calls, so that only the pass that emits such calls may know it.
ONLY_REWRITE = {"runtime"}
WITHOUT_TORCH = {
    "errors", "units", "plan", "tables", "explain", "hull", "chain_costs", "report", "clock", "decide", "overwrite",
    "goal", "moments", "search", "segments", "replay", "menus",
    "passes.cuts", "passes.menu", "passes.dp", "passes.sqrtn", "passes.bound", "passes.schedule", "passes.simulate",
}  # fmt: skip


def sources() -> dict[str, Path]:
    """Module name within fxckpt -> file; those of passes/ under ``passes.``."""
    found = {path.stem: path for path in (ROOT / "fxckpt").glob("*.py")}
    found.update({f"integrations.{path.stem}": path for path in (ROOT / "fxckpt/integrations").glob("*.py")})
    found.update({f"passes.{path.stem}": path for path in (ROOT / "passes").glob("*.py") if path.stem != "__init__"})
    return found


def imports(path: Path) -> set[str]:
    """Every module that the file imports anywhere, ``from a import b`` as both ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.add(node.module or "")
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return found


def own_imports(name: str) -> set[str]:
    """Modules of fxckpt that module ``name`` imports."""
    known = sources()
    return {full.removeprefix("fxckpt.") for full in imports(known[name]) if full.removeprefix("fxckpt.") in known}


def level(name: str) -> int:
    top = name.split(".")[0]
    matches = [index for index, names in enumerate(LEVELS) if top in names]
    assert matches, f"fxckpt/{top}.py is new: give it a level in {__file__}"
    return matches[0]


MODULES = sorted(sources())
PASSES = [name for name in MODULES if name.startswith("passes.")]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    for other in own_imports(name):
        assert level(other) < level(name), f"{name} imports {other}"
    if name.startswith("passes.") and name != "passes.rewrite":
        assert not own_imports(name) & ONLY_REWRITE


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH & set(MODULES)))
def test_decisions_need_no_torch(name: str) -> None:
    # The package's own __init__ may load torch, so that an empty package takes its place.
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('fxckpt')\n"
        f"package.__path__ = [{str(ROOT / 'fxckpt')!r}]\n"
        "sys.modules['fxckpt'] = package\n"
        f"import fxckpt.{name}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_one_public_function(name: str) -> None:
    tree = ast.parse(sources()[name].read_text(encoding="utf-8"))
    stem = name.removeprefix("passes.")
    public = [
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    ]
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert len(exported) == 1, f"passes/{stem}.py exports {exported}"
    assert public == exported, f"passes/{stem}.py has public names besides {exported}: {public}"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert exported[0] in functions


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name: str) -> None:
    text = sources()[name].read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines; split it along the data it returns"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            doc = node.body[0] if ast.get_docstring(node) else None
            if doc is not None:  # a full docstring is no fault of the function
                length -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {length} lines"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "_torch"])
def test_private_torch_names_stay_in_one_file(name: str) -> None:
    tree = ast.parse(sources()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            private = text.startswith("torch.") and any(re.match("_(?!_)", part) for part in text.split("."))
            assert not private, f"{name}:{node.lineno} uses {text}; it belongs in fxckpt/_torch.py"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            # torch's documentation sends users to these two modules in spite of their names
            private = any(part.startswith("_") for part in parts if part not in ("_pytree", "_python_dispatch"))
            assert not private, f"{name}:{node.lineno} imports from {node.module}; it belongs in fxckpt/_torch.py"


def test_passes_folder_refuses_to_be_a_top_level_package() -> None:
    done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "from fxckpt.passes import" in done.stderr


def test_the_link_to_the_passes_is_relative() -> None:
    assert (ROOT / "fxckpt/passes").is_symlink()
    assert (ROOT / "fxckpt/passes").readlink() == Path("../passes")
