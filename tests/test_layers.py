"""Imports point down, and every command has its front door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fastactrec"
# "": the package itself, for __version__
ANYONE = {"config", "config_file", "errors", "files", "machine", "options", "phases", "progress", ""}
ALLOWED = {
    "ops": {"_ext"},
    "data": {"ops"},
    "models": {"ops"},
    "optim": {"ops"},
    "engine": {"data", "models", "optim", "ops", "reporting"},
    "reporting": set(),
    "cli": set(),
}
FRONT_DOORS = {"prepare", "train", "evaluate", "predict", "report", "doctor"}
ALLOWED |= {door: {"engine", "reporting", "data", "models", "optim", "ops", "cli"} for door in FRONT_DOORS}
ALLOWED["train"] |= {"prepare", "report"}  # the whole path in one command
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(module: str) -> str:
    return module.split(".")[0]


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, relative to the package, and outside packages as ``/name``."""
    parents = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parents[: len(parents) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join([*base, name]) for name in names}
        elif isinstance(node, ast.ImportFrom):
            found.add("/" + node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {"/" + alias.name.split(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path):
    own = room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    used = {room(name) for name in imports(path) if not name.startswith("/")}
    used -= ANYONE | {own, "__version__"}
    allowed = ALLOWED.get(own, set())
    assert used <= allowed, f"{own} may not import {used - allowed}"


def test_reporting_knows_no_torch():
    for path in (PACKAGE / "reporting").glob("*.py"):
        assert not imports(path) & {"/torch", "/torchvision"}, path


def test_only_ops_imports_the_extension():
    for path in MODULES:
        if path != PACKAGE / "ops.py":
            assert "_ext" not in {name.split(".")[-1] for name in imports(path)}, path


def test_every_command_has_a_front_door():
    from fastactrec.cli import COMMANDS

    assert set(COMMANDS) == FRONT_DOORS
    for name in COMMANDS:
        assert (PACKAGE / f"{name}.py").is_file()
