"""Who may import what, beyond the contracts of import-linter: what really gets loaded, and one owner a dependency."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

# Third-party package -> the only parts of ours that may name it. A trailing slash is a whole package.
OWNERS: dict[str, tuple[str, ...]] = {
    "torch": (
        "diptych/attention/",
        "diptych/engine/",
        "diptych/kernels/",
        "diptych/kv/pool.py",
        "diptych/layers/",
        "diptych/models/",
        "diptych/parallel/",
        "diptych/sampling/",
        "diptych/speculative/",
        "diptych/worker/",
    ),
    "gguf": ("diptych/gguf_", "diptych/models/", "diptych/tokenizer.py"),
    "safetensors": ("diptych/models/",),
    "tokenizers": ("diptych/gguf_tokenizer.py", "diptych/tokenizer.py"),
    "llguidance": ("diptych/sampling/", "diptych/tokenizer.py"),
    "zmq": (
        "diptych/core/channel.py",
        "diptych/engine/",
        "diptych/offline.py",
        "diptych/server/",
        "diptych/transfer/sockets.py",
    ),
    "pydantic": ("diptych/server/",),
    "starlette": ("diptych/router/", "diptych/server/"),
    "uvicorn": ("diptych/router/process.py", "diptych/server/"),
    "aiohttp": ("diptych/bench/", "diptych/router/upstream.py", "diptych/server/registry_client.py"),
    "jinja2": ("diptych/server/",),
    "prometheus_client": ("diptych/metrics.py", "diptych/router/metrics.py", "diptych/server/"),
    "tyro": ("diptych/cli/",),
    "yaml": ("diptych/cli/config_file.py",),
    "transformers": (),
    "flashinfer": ("diptych/attention/flashinfer.py",),
    "nixl": (),
    "nixl_cu13": ("diptych/transfer/nixl.py",),
}

TORCH_FREE = (
    "diptych",
    "diptych.config",
    "diptych.core.batch",
    "diptych.core.channel",
    "diptych.core.messages",
    "diptych.core.request",
    "diptych.core.sequence",
    "diptych.kv",
    "diptych.kv.allocator",
    "diptych.kv.cache",
    "diptych.kv.layout",
    "diptych.kv.prefix_cache",
    "diptych.parallel.mesh",
    "diptych.resolve",
    "diptych.router",
    "diptych.router.process",
    "diptych.scheduler",
    "diptych.scheduler.scheduler",
    "diptych.server.app",
    "diptych.tokenizer",
    "diptych.engine.peering",
    "diptych.transfer.agent",
    "diptych.transfer.control",
    "diptych.transfer.hinge",
    "diptych.transfer.loopback",
    "diptych.transfer.sockets",
    "diptych.worker.transfer_agent",
    "diptych.transfer.destination",
    "diptych.transfer.handoff",
    "diptych.transfer.plan",
    "diptych.transfer.state",
    "diptych.transfer.wire",
)

REPORT = "import sys; print(','.join(m for m in ('torch', 'transformers') if m in sys.modules))"


def imported_packages(tree: ast.Module) -> Iterator[str]:
    """Top-level package of every import in a module, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]


def test_dependencies_have_one_owner(modules):
    strays = [
        f"{module.name} imports {package}"
        for module in modules
        for package in imported_packages(module.tree)
        if package in OWNERS and not module.name.startswith(OWNERS[package] or "-")
    ]
    assert not strays


@pytest.mark.parametrize("name", ["role", "roles"])
def test_role_is_read_in_one_place(modules, name):
    readers = [
        f"{module.name}:{node.lineno}"
        for module in modules
        if not module.name.startswith(("diptych/engine/roles.py", "diptych/cli/"))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Attribute | ast.Name)
        if "config" in ast.unparse(node.value).lower()
    ]
    assert not readers


def loaded_by(code: str) -> str:
    """Which of the heavy packages a fresh interpreter has loaded after running `code`."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_host_side_leaves_torch_unimported():
    assert loaded_by("import " + ", ".join(TORCH_FREE)) == ""


def test_help_is_light():
    code = """
from diptych.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit as stop:
    assert not stop.code
"""
    assert loaded_by(code) == ""


def test_the_probe_sees_torch():
    assert loaded_by("import torch") == "torch"


def test_relative_imports_are_not_used(modules):
    found = [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.level > 0 or any(alias.name == "*" for alias in node.names))
    ]
    assert not found
