"""Habits that linters do not know: no probing of attributes, no pickle, no machine paths, ASCII, docstrings."""

from __future__ import annotations

import ast
import re

import pytest

PROBES = ("hasattr", "setattr", "delattr", "getattr")
BANNED_NAMES = ("utils", "misc", "manager", "helper", "helpers", "common", "impl")


def literal_probes(tree: ast.AST) -> list[str]:
    """Calls of hasattr, and of getattr and its kin with a literal name: the type should say what is there."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PROBES):
            continue
        names_literal = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        if node.func.id == "hasattr" or names_literal:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_attribute_probing(modules):
    assert not {module.name: found for module in modules if (found := literal_probes(module.tree))}


@pytest.mark.parametrize("code", ["hasattr(a, name)", "getattr(a, 'b', None)", "setattr(a, 'b', 1)"])
def test_probing_would_be_found(code):
    assert literal_probes(ast.parse(code))


def test_no_pickle(modules):
    pattern = re.compile(r"\b(?:import|from)\s+(?:pickle|dill|cloudpickle|marshal|shelve)\b|pickle\.loads?|recv_pyobj")
    assert not [module.name for module in modules if pattern.search(module.text)]


def test_no_machine_paths(modules):
    pattern = re.compile(r"/(?:work|root|home)/\w")
    assert not [module.name for module in modules if pattern.search(module.text)]


def test_sources_are_ascii(modules):
    assert not [module.name for module in modules if not module.text.isascii()]


def test_no_leftovers(modules):
    pattern = re.compile(r"\b(?:HACK|XXX|FIXME)\b|\bTODO(?!\(#\d+\))|NotImplementedError")
    found = {module.name: sorted({m[0] for m in pattern.finditer(module.text)}) for module in modules}
    assert not {name: words for name, words in found.items() if words}


def test_modules_are_not_drawers(modules):
    parts = {part.removesuffix(".py") for module in modules for part in module.name.split("/")}
    assert not parts & set(BANNED_NAMES)


def test_every_module_has_a_docstring(modules):
    assert not [module.name for module in modules if not ast.get_docstring(module.tree)]


def test_every_public_class_and_function_has_a_docstring(modules):
    missing = [
        f"{module.name}:{node.name}"
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not missing


def test_annotations_are_lazy(modules):
    line = "from __future__ import annotations"
    assert not [module.name for module in modules if line not in module.text and module.tree.body[1:]]
