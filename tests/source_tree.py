"""Scripts of the source tree, profiling/ and bench/, as modules: they are no part of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parent.parent


def script(path: str) -> Path:
    """A script by its path from the root; where only the tests are, the module that asks is skipped."""
    found = REPO / path
    if not found.is_file():
        pytest.skip("the source tree is not here", allow_module_level=True)
    return found


def load(path: str) -> ModuleType:
    """The same, imported: its dataclasses and those who import it by name find it in sys.modules."""
    found = script(path)
    spec = importlib.util.spec_from_file_location(found.stem, found)
    module = importlib.util.module_from_spec(spec)
    sys.modules[found.stem] = module
    spec.loader.exec_module(module)
    return module
