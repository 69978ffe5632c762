"""Every file of examples/ runs as its first lines say, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTPUTS = {
    "chat_openai.py": "tokens in,",
    "lora.py": "mine:",
    "offline_batch.py": "length",
    "structured_output.py": "stars=",
    "tool_call.py": "It is sunny in",
    "update_weights.py": "step 29: ",
}
NEEDS_NO_SERVER = {"lora.py", "offline_batch.py", "update_weights.py"}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(OUTPUTS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_example(name, request):
    arguments = [] if name in NEEDS_NO_SERVER else [request.getfixturevalue("server").url]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert OUTPUTS[name] in done.stdout
