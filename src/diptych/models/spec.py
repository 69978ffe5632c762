"""Which model, in which format, from which files: everything that can be known and checked before memory is taken.

Never imports torch, so that a server may look at a model without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diptych.config import ModelConfig
from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile, is_gguf
from diptych.models.config import TransformerConfig
from diptych.models.gguf import config_from_gguf
from diptych.models.huggingface import config_from_folder
from diptych.models.safetensors_files import find_safetensors

WeightFormat = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that can be loaded. files: what holds the weights (none for dummy weights). seed: of dummy weights."""

    path: Path
    weight_format: WeightFormat
    config: TransformerConfig
    files: tuple[Path, ...]
    seed: int = 0


def inspect_model(config: ModelConfig) -> ModelSpec:
    """Find out what `config.model_path` holds, and check every file of it as far as headers go.

    Raises ConfigError if there is no model there, if a file is missing or damaged, or if the architecture, the
    quantisation or the rotary scaling is not supported.
    """
    path = Path(config.model_path).expanduser()
    if not path.exists():
        raise ConfigError(f"there is no model at {path}; name a Hugging Face folder or a GGUF file.")
    gguf = is_gguf(path)
    if path.is_file() and not gguf:
        raise ConfigError(f"{path} is not a GGUF file; name a GGUF file or the folder that holds config.json.")
    weight_format: WeightFormat = "gguf" if gguf else "safetensors"
    if config.load_format == "dummy":
        weight_format = "dummy"
    elif config.load_format not in ("auto", weight_format):
        raise ConfigError(f"load format {config.load_format} was asked for, but {path} holds {weight_format}.")
    transformer = config_from_gguf(GGUFFile(path)) if gguf else config_from_folder(path)
    files: tuple[Path, ...] = ()
    if weight_format != "dummy":
        files = (path,) if gguf else find_safetensors(path)
    return ModelSpec(path=path, weight_format=weight_format, config=transformer, files=files, seed=config.seed)
