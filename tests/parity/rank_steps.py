"""The same steps for one rank and for many: prompts in chunks, decodes, a late arrival, and sequences that end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from tiny_models import StateDictSource, checkpoint, our_config, prompt, reference_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych.attention.registry import create_attention
from diptych.core.batch import Admission, Batch, ConfirmedTokens, SequenceStep, StepOutput
from diptych.core.request import Grammar, GrammarKind, SamplingParams
from diptych.kv.pool import KVPool
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups
from diptych.sampling.grammar import GrammarCompiler
from diptych.sampling.sampler import Sampler
from diptych.worker.pool import layout_of
from diptych.worker.rows import Rows
from diptych.worker.runner import ModelRunner, Runner, TorchStepModel
from diptych.worker.slots import SlotTable
from diptych.worker.stages import LastStage, StageRunner

GREEDY = SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=3)
PAGE_SIZE = 4
MAX_LEN = 64
NUM_SLOTS = 8


@cache
def tokenizer_json() -> str:
    """Printable characters, one token each, after the end token and one that is never used: 96."""
    tokens = ["<eos>", "<pad>", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    return tokenizer.to_str()


@dataclass
class Story:
    """One sequence: when it comes, and how its prompt is cut. The steps after its prompt decode it."""

    prompt: list[int]
    sampling: SamplingParams
    begins: int = 0
    chunks: tuple[int, ...] = ()
    num_steps: int = 8
    outputs: list[int] = field(default_factory=list)


def rank_runner(model: Transformer, backend: str) -> Runner:
    """What `create_worker` puts around a loaded model, with a pool of its own."""
    dtype = next(model.parameters()).dtype
    pool = KVPool(layout_of(model, PAGE_SIZE, dtype), 80, torch.device("cpu"), dtype)
    attention = create_attention(backend, pool)
    grammars = partial(GrammarCompiler, tokenizer_json(), model.config.vocab_size, (0,))
    sampler = Sampler(model.config.vocab_size, NUM_SLOTS, device=torch.device("cpu"), grammars=grammars)
    rows = Rows(SlotTable(NUM_SLOTS, MAX_LEN, PAGE_SIZE), sampler)
    stages = model.groups.pipeline
    if not stages.is_last:
        return StageRunner(model, attention, rows, model.device)
    step_model = (TorchStepModel if stages.size == 1 else LastStage)(model, attention, model.device)
    return ModelRunner(step_model, rows)


def play(runner: Runner, stories: list[Story]) -> list[StepOutput]:
    """Run the stories on one rank that samples, and note the tokens that they get."""
    outputs = []
    for batch, rows in batches_of(stories):
        output = runner.launch(batch).collect()
        for story, row in zip(rows, output.rows, strict=True):
            assert row.error is None, row.error
            story.outputs += row.token_ids
        outputs.append(output)
    return outputs


def replay(runner: Runner, stories: list[Story]) -> list[StepOutput]:
    """Run stories that have been played, on any rank, without waiting for what the last stage finds."""
    return [runner.launch(batch).collect() for batch, _ in batches_of(stories)]


def batches_of(stories: list[Story]) -> Iterator[tuple[Batch, list[Story]]]:
    """Batches and the stories in them; a story's own tokens are looked up when its batch is made."""
    ends = [story.begins + len(story.chunks or (1,)) + story.num_steps for story in stories]
    told = [0] * len(stories)
    for step in range(max(ends)):
        admissions, rows, steps, tokens = [], [], [], []
        for slot, story in enumerate(stories):
            chunks = story.chunks or (len(story.prompt),)
            if not story.begins <= step < ends[slot]:
                continue
            turn = step - story.begins
            if turn == 0:
                admissions.append(
                    Admission(
                        slot, f"r{slot}", story.prompt, len(story.prompt), story.sampling, (), story.num_steps + 1
                    )
                )
            is_prompt = turn < len(chunks)
            start = sum(chunks[:turn]) if is_prompt else len(story.prompt) + turn - len(chunks)
            count = chunks[turn] if is_prompt else 1
            num_known = max(0, turn - len(chunks) + 1)
            if num_known > told[slot]:
                tokens.append(ConfirmedTokens(slot, story.outputs[told[slot] : num_known]))
                told[slot] = num_known
            have = -(-start // PAGE_SIZE)
            need = -(-(start + count) // PAGE_SIZE)
            pages = [10 * slot + page for page in range(have, need)]
            samples = turn >= len(chunks) - 1
            steps.append(SequenceStep(slot, start, count, pages, samples))
            rows.append(story)
        yield Batch(step, [], admissions, steps, tokens), rows


def stories() -> list[Story]:
    """Greedy, and everything else that looks at logits or at tokens so far."""
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=7, logprobs=2)
    shaped = SamplingParams(temperature=0.7, seed=3, grammar=Grammar(GrammarKind.REGEX, "[a-f]{2,3}(xy|z)[0-9]{9}"))
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=2)
    return [
        Story(prompt(9, 1), GREEDY, chunks=(3, 4, 2)),
        Story(prompt(6, 2), SamplingParams(temperature=0.0)),
        Story(prompt(5, 3), drawn, begins=2, chunks=(4, 1)),
        Story(prompt(4, 4), penalised, begins=1),
        Story(prompt(3, 5), shaped, begins=1),
    ]


def model_of(case: str, groups: LayerGroups) -> Transformer:
    reference = reference_model(case)
    config = our_config(reference.config, type(reference).__name__)
    model = MODELS.resolve(config.architecture)(config, groups=groups, dtype=torch.float32, device="cpu")
    model.load(StateDictSource(checkpoint(case)))
    return model


@cache
def play_alone(case: str) -> tuple[list[Story], list[StepOutput]]:
    told = stories()
    with torch.inference_mode():
        return told, play(rank_runner(model_of(case, ONE_RANK), "reference"), told)


def assert_alike(actual: list[StepOutput], expected: list[StepOutput]) -> None:
    """The same tokens, at the same logprobs."""
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for row, other in zip(ours.rows, theirs.rows, strict=True):
            assert row.token_ids == other.token_ids, f"step {step}"
            for entry, known in zip(
                row.logprobs + row.prompt_logprobs, other.logprobs + other.prompt_logprobs, strict=True
            ):
                assert (entry.token_id, entry.rank) == (known.token_id, known.rank)
                assert [token for token, _ in entry.top] == [token for token, _ in known.top]
                found = torch.tensor([entry.logprob, *(value for _, value in entry.top)])
                wanted = torch.tensor([known.logprob, *(value for _, value in known.top)])
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
