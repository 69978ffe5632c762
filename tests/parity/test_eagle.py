"""An EAGLE head guesses what the same head says over the whole text, computed without pages, batches or steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from diptych import LLM, SamplingParams
from diptych.errors import ConfigError
from diptych.speculative.drafter import DraftRow
from diptych.speculative.eagle import EagleDrafter

VOCAB, HIDDEN, MOST = 96, 48, 3
PROMPTS = [[5, 9, 33, 2, 71, 8, 9], [40], list(range(3, 60)), [7, 8, 9, 10] * 3]
OPTIONS = {"dtype": "float32", "page_size": 4, "kv_cache_memory": "1MiB", "num_threads": 1, "check_invariants": True}


class ReferenceHead(nn.Module):
    """The head in terms of transformers' own layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, token_ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        x = self.fc(torch.cat([self.embed_tokens(torch.tensor(token_ids)), hidden], dim=1))[None]
        positions = torch.arange(len(token_ids))[None]
        mask = torch.full((len(token_ids),) * 2, -torch.inf).triu(1)[None, None]
        out = self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, positions))
        return (out[0] if isinstance(out, tuple) else out).view(-1, HIDDEN)

    def save(self, folder: Path, config: LlamaConfig) -> None:
        config.save_pretrained(folder)
        layer = {f"layers.0.{name}": value for name, value in self.layer.state_dict().items()}
        own = {"embed_tokens.weight": self.embed_tokens.weight, "fc.weight": self.fc.weight, "fc.bias": self.fc.bias}
        save_file(
            {name: value.detach().contiguous() for name, value in (layer | own).items()}, folder / "model.safetensors"
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and head, both random."""
    torch.manual_seed(3)
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    LlamaForCausalLM(llama_config(num_layers=2)).save_pretrained(target)
    vocabulary = {f"t{token_id} ": token_id for token_id in range(VOCAB)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0 ")).save(str(target / "tokenizer.json"))
    reference = ReferenceHead(llama_config(num_layers=1))
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    reference.save(head, llama_config(num_layers=1))
    return target, head


def llama_config(*, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Every text that was to be continued, and what was guessed."""
    found: list[tuple[list[int], list[int]]] = []
    propose = EagleDrafter.propose

    def recording(self: EagleDrafter, rows: list[DraftRow]) -> list[list[int]]:
        drafts = propose(self, rows)
        found.extend((self._texts.of(row.slot).tolist(), drafted) for row, drafted in zip(rows, drafts, strict=True))
        return drafts

    monkeypatch.setattr(EagleDrafter, "propose", recording)
    yield found


def expected_guesses(target: LlamaForCausalLM, head: ReferenceHead, text: list[int], count: int) -> list[int]:
    hidden = target.model(torch.tensor([text])).last_hidden_state[0, : len(text) - 1]
    token_ids, found = text[1:], []
    for _ in range(count):
        predicted = head(token_ids, hidden)
        found.append(int(target.lm_head(predicted[-1]).argmax()))
        token_ids = [*token_ids, found[-1]]
        hidden = torch.cat([hidden, predicted[-1:]])
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}, {"prefix_caching": False, "max_num_seqs": 2}])
def test_guesses_are_those_of_the_head_over_the_whole_text(folders, guesses, options) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    flags = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(folders[1])}
    flags |= {"speculative_num_draft_tokens": MOST, "speculative_adaptive": False}
    with LLM(str(folders[0]), **OPTIONS, **flags, **options) as llm:
        outputs = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
    target = LlamaForCausalLM.from_pretrained(folders[0])
    head = load_head(folders[1])
    with torch.inference_mode():
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            token_ids = torch.tensor([prompt])
            found = target.generate(token_ids, do_sample=False, max_new_tokens=12, eos_token_id=None)
            assert output == found[0, len(prompt) :].tolist()
        assert len(guesses) > 30
        for text, drafted in guesses:
            assert drafted == expected_guesses(target, head, text, len(drafted))
        # Only where the prompt is one token is there nothing yet from which to guess.
        assert sum(not drafted for _, drafted in guesses) <= 1


def load_head(folder: Path) -> ReferenceHead:
    head = ReferenceHead(llama_config(num_layers=1))
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict({name.replace("layers.0.", "layer."): value for name, value in tensors.items()}, strict=False)
    return head.eval()


def test_a_head_for_another_model_is_refused(folders, tmp_path) -> None:
    config = llama_config(num_layers=1)
    config.hidden_size = 32
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="32 hidden elements, the model 48"):
        LLM(str(folders[0]), **OPTIONS, speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path))
