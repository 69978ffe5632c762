"""Architecture name to model class, imported only when it is built. Never imports torch itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from diptych.errors import ConfigError

if TYPE_CHECKING:
    from diptych.models.transformer import Transformer

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Names to "module:attribute", resolved on first use.

    Args: what: the thing named, for error messages ("model architecture").
    """

    def __init__(self, what: str, entries: Mapping[str, str]) -> None:
        self._what = what
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted(self._entries)

    def check(self, name: str) -> None:
        """Raises ConfigError listing what is supported if `name` is not."""
        if name not in self._entries:
            raise ConfigError(f"{self._what} {name!r} is not supported; supported are: {', '.join(self.names())}.")

    def resolve(self, name: str) -> type[Entry]:
        """The class registered under `name`, imported now. Raises ConfigError as `check` does."""
        self.check(name)
        module, _, attribute = self._entries[name].partition(":")
        found: type[Entry] = vars(importlib.import_module(module))[attribute]
        return found


MODELS: Registry[Transformer] = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "diptych.models.llama:LlamaModel",
        "MistralForCausalLM": "diptych.models.llama:LlamaModel",
        "Qwen2ForCausalLM": "diptych.models.qwen2:Qwen2Model",
        "Qwen3ForCausalLM": "diptych.models.qwen3:Qwen3Model",
        "MixtralForCausalLM": "diptych.models.mixtral:MixtralModel",
        "Qwen2MoeForCausalLM": "diptych.models.qwen2_moe:Qwen2MoeModel",
        "Qwen3MoeForCausalLM": "diptych.models.qwen3_moe:Qwen3MoeModel",
        "DeepseekV2ForCausalLM": "diptych.models.deepseek:DeepseekModel",
        "DeepseekV3ForCausalLM": "diptych.models.deepseek:DeepseekModel",
        "Gemma3ForCausalLM": "diptych.models.gemma3:Gemma3Model",
        "Gemma3TextModel": "diptych.models.gemma3:Gemma3Model",
        "Gemma3ForConditionalGeneration": "diptych.models.gemma3:Gemma3Model",
    },
)
