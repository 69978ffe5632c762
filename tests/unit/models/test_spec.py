"""What is at a path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.models.spec import inspect_model


def test_folder_and_gguf(tiny_folder: Callable[..., Path], tiny_gguf: Callable[..., Path]) -> None:
    folder, file = tiny_folder("qwen3"), tiny_gguf("qwen3")
    spec = inspect_model(ModelConfig(model_path=str(folder)))
    assert (spec.weight_format, spec.files) == ("safetensors", (folder / "model.safetensors",))
    spec = inspect_model(ModelConfig(model_path=str(file), load_format="gguf"))
    assert (spec.weight_format, spec.files) == ("gguf", (file,))
    assert spec.config.architecture == "Qwen3ForCausalLM"


def test_gguf_is_known_by_its_content(tiny_gguf: Callable[..., Path]) -> None:
    file = tiny_gguf("llama")
    renamed = file.rename(file.with_suffix(".bin"))
    assert inspect_model(ModelConfig(model_path=str(renamed))).weight_format == "gguf"


def test_what_is_no_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        inspect_model(ModelConfig(model_path=str(tmp_path / "nowhere")))
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        inspect_model(ModelConfig(model_path=str(text)))
    with pytest.raises(ConfigError, match="load format gguf was asked for"):
        inspect_model(ModelConfig(model_path=str(tiny_folder("llama")), load_format="gguf"))


def test_looking_at_a_model_does_not_import_torch(
    tiny_folder: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> None:
    paths = [str(tiny_folder("llama")), str(tiny_gguf("llama"))]
    program = (
        "import sys; from diptych.config import ModelConfig; from diptych.models.spec import inspect_model; "
        "import diptych.tokenizer; "
        f"[inspect_model(ModelConfig(model_path=path)) for path in {paths!r}]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
