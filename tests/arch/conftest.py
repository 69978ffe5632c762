"""The package as parsed source: what every architecture test looks at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "diptych"


@dataclass(frozen=True)
class Module:
    """One source file. name: below src, such as "diptych/kv/pool.py"."""

    name: str
    text: str
    tree: ast.Module


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(PACKAGE.parent).as_posix(), text, ast.parse(text)))
    assert found, f"no modules under {PACKAGE}"
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
