from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from diptych.core.request import Grammar, GrammarKind, SamplingParams
from diptych.errors import RequestError, Unsupported
from diptych.sampling.grammar import GrammarCompiler
from diptych.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 300
EOS = 0


def make_sampler(grammars: GrammarCompiler | None = None, *, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, 16, device=CPU, grammars=grammars)


def admit(sampler: Sampler, slot: int, sampling: SamplingParams, token_ids: list[int] | None = None, prompt: int = 3):
    sampler.admit(slot, sampling, token_ids or [5, 6, 7], prompt, (EOS,))


def logits_at(position: int, *, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """A fake model: the same logits for the same position."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(1000 * seed + position)) * 2


def generate(sampler: Sampler, slot: int, start: int, stop: int, *, vocab_size: int = VOCAB) -> list[int]:
    output: list[int] = []
    for position in range(start, stop):
        rows = sampler.sample(logits_at(position, vocab_size=vocab_size)[None], [slot])
        assert rows.errors == [None]
        output.append(int(rows.token_ids[0]))
    return output


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(top_k=1)])
def test_greedy_rows_are_the_argmax_and_leave_the_logits_alone(sampling: SamplingParams) -> None:
    sampler = make_sampler()
    for slot in range(4):
        admit(sampler, slot, sampling)
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    rows = sampler.sample(logits, [2, 0, 3, 1])
    assert torch.equal(rows.token_ids, before.argmax(dim=1))
    assert rows.token_ids.dtype == torch.int64
    assert rows.errors == rows.logprobs == [None] * 4
    assert torch.equal(logits, before)


def test_greedy_tokens_found_elsewhere_count_and_must_be_finite() -> None:
    sampler = make_sampler()
    for slot in range(2):
        admit(sampler, slot, SamplingParams(temperature=0))
    assert sampler.is_greedy([0, 1])
    rows = sampler.take(torch.tensor([7, 9]), torch.tensor([1.5, float("nan")]), [1, 0])
    assert rows.token_ids.tolist() == [7, 0]
    assert rows.errors[0] is None and "not finite" in str(rows.errors[1])
    assert rows.logprobs == [None, None]


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=8),
    SamplingParams(temperature=1.5, min_p=0.05, seed=9),
]


def test_tokens_left_on_the_device_are_the_same() -> None:
    here, there = make_sampler(), make_sampler()
    for slot, sampling in enumerate(MIXED):
        admit(here, slot, sampling)
        admit(there, slot, sampling)
    there.warm_up(torch.bfloat16)
    for position in range(5):  # the noise differs from step to step
        logits = torch.stack([logits_at(position, seed=slot) for slot in range(len(MIXED))]).bfloat16()
        slots = [2, 0, 3, 1]
        assert not there.needs_host(slots)
        token_ids = there.sample_device(logits, slots)
        assert token_ids.dtype == torch.int64
        assert torch.equal(token_ids, here.sample(logits.float(), slots).token_ids)


def test_unsound_rows_left_on_the_device_are_marked() -> None:
    sampler = make_sampler()
    for slot, sampling in enumerate(MIXED):
        admit(sampler, slot, sampling)
    logits = torch.randn(4, VOCAB)
    logits[0, 5] = logits[2, 5] = torch.nan
    assert (sampler.sample_device(logits, [0, 1, 2, 3]) >= 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("sampling", "needs_host"),
    [
        (SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=1), False),
        (SamplingParams(logprobs=1), True),
        (SamplingParams(logit_bias={3: 1.0}), True),
        (SamplingParams(repetition_penalty=1.2), True),
        (SamplingParams(min_tokens=3), True),
    ],
)
def test_which_rows_need_the_host(sampling: SamplingParams, needs_host: bool) -> None:
    sampler = make_sampler()
    admit(sampler, 0, SamplingParams(temperature=0))
    admit(sampler, 1, sampling)
    assert sampler.needs_host([0, 1]) == needs_host
    assert not sampler.needs_host([0])
    sampler.release(1)
    assert not sampler.needs_host([0, 1])


def test_no_rows_give_no_tokens() -> None:
    rows = make_sampler().sample(torch.zeros(0, VOCAB), [])
    assert rows.token_ids.shape == (0,)
    assert rows.errors == []


def test_the_same_seed_gives_the_same_tokens_in_any_batch(compiler: GrammarCompiler) -> None:
    rng = np.random.default_rng(3)
    vocab_size = compiler.vocab_size
    mine = SamplingParams(temperature=1.2, top_p=0.97, seed=-77, frequency_penalty=0.4)
    alone = make_sampler(vocab_size=vocab_size)
    admit(alone, 0, mine)
    expected = generate(alone, 0, 0, 25, vocab_size=vocab_size)
    crowd = [
        SamplingParams(temperature=0),
        SamplingParams(seed=5),
        SamplingParams(seed=-77, min_p=0.2, logprobs=2),
        SamplingParams(seed=9, top_k=3, logit_bias={4: 9.0}),
        SamplingParams(seed=10, grammar=Grammar(GrammarKind.REGEX, "[a-z]*")),
        SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=40),
    ]
    sampler = make_sampler(compiler, vocab_size=vocab_size)
    admit(sampler, 9, mine)
    for slot, sampling in enumerate(crowd):
        admit(sampler, slot, sampling)
    output = []
    for position in range(25):
        others = rng.permutation(len(crowd))[: rng.integers(0, len(crowd) + 1)].tolist()
        slots = [*others, 9]
        rng.shuffle(slots)
        logits = torch.randn(len(slots), vocab_size) * 2
        logits[slots.index(9)] = logits_at(position, vocab_size=vocab_size)
        rows = sampler.sample(logits, slots)
        assert rows.errors == [None] * len(slots)
        output.append(int(rows.token_ids[slots.index(9)]))
    assert output == expected


def test_other_seeds_give_other_tokens() -> None:
    sampler = make_sampler()
    outputs = []
    for seed in (1, 2):
        admit(sampler, 0, SamplingParams(seed=seed))
        outputs.append(generate(sampler, 0, 0, 20))
        sampler.release(0)
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=4),
        SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=0, repetition_penalty=2.0, min_tokens=12, logit_bias={EOS: 50.0}),
        SamplingParams(seed=8, grammar=Grammar(GrammarKind.REGEX, "[a-e]{20}")),
    ],
    ids=["seeded", "penalties", "min_tokens", "grammar"],
)
@pytest.mark.parametrize("cut", [1, 7])
def test_after_a_retraction_the_output_goes_on_as_if_nothing_had_happened(
    compiler: GrammarCompiler, sampling: SamplingParams, cut: int
) -> None:
    vocab_size = compiler.vocab_size
    sampler = make_sampler(compiler, vocab_size=vocab_size)
    admit(sampler, 0, sampling)
    expected = generate(sampler, 0, 0, 15, vocab_size=vocab_size)
    sampler.release(0)
    admit(sampler, 1, sampling)
    output = generate(sampler, 1, 0, cut, vocab_size=vocab_size)
    sampler.release(1)
    admit(sampler, 3, sampling, [5, 6, 7, *output])
    assert output + generate(sampler, 3, cut, 15, vocab_size=vocab_size) == expected


def test_min_tokens_hold_back_eos_and_stop_tokens() -> None:
    sampler = make_sampler()
    sampler.admit(0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9, 10**6)), [1], 1, (EOS,))
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[9], logits[4] = 9.0, 8.0, 7.0
    tokens = [int(sampler.sample(logits.clone()[None], [0]).token_ids[0]) for _ in range(3)]
    assert tokens == [4, 4, EOS]
    sampler.admit(1, SamplingParams(temperature=0, min_tokens=2), [1], 1, ())  # EOS is ignored: an ordinary token
    assert int(sampler.sample(logits.clone()[None], [1]).token_ids[0]) == EOS


def test_logit_bias_forbids_and_forces() -> None:
    sampler = make_sampler()
    admit(sampler, 0, SamplingParams(temperature=0, logit_bias={8: -100.0}))
    admit(sampler, 1, SamplingParams(seed=1, logit_bias={11: 100.0}))
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 5.0
    logits[0, 3] = 4.0
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [3, 11]


def test_logprobs_are_of_the_raw_distribution_whatever_was_applied(compiler: GrammarCompiler) -> None:
    vocab_size = compiler.vocab_size
    sampler = make_sampler(compiler, vocab_size=vocab_size)
    admit(sampler, 0, SamplingParams(temperature=0, logprobs=3, logit_bias={40: 100.0}, repetition_penalty=2.0))
    admit(sampler, 1, SamplingParams(seed=2, temperature=0.3))
    admit(sampler, 2, SamplingParams(seed=2, logprobs=0, grammar=Grammar(GrammarKind.REGEX, "a+")))
    admit(sampler, 3, SamplingParams(temperature=0, logprob_token_ids=(2, 1)))
    logits = torch.randn(4, vocab_size)
    reference = torch.log_softmax(logits, dim=1)
    rows = sampler.sample(logits.clone(), [0, 1, 2, 3])
    assert rows.logprobs[1] is None
    for row in (0, 2, 3):
        entry = rows.logprobs[row]
        assert entry is not None
        token = int(rows.token_ids[row])
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(reference[row, token]), abs=1e-5)
        assert entry.rank == int((reference[row] > reference[row, token]).sum()) + 1
    assert int(rows.token_ids[0]) == 40
    first, third = rows.logprobs[0], rows.logprobs[3]
    assert first is not None and third is not None
    assert [token for token, _ in first.top] == torch.topk(reference[0], 3).indices.tolist()
    assert [token for token, _ in third.extra] == [2, 1]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_yields_an_error_and_the_others_go_on(sampling: SamplingParams, bad: float) -> None:
    sampler = make_sampler()
    admit(sampler, 0, sampling)
    admit(sampler, 1, SamplingParams(temperature=0, logprobs=1))
    admit(sampler, 2, SamplingParams(temperature=0))
    logits = torch.randn(3, VOCAB)
    logits[0, 100] = bad
    rows = sampler.sample(logits, [0, 1, 2])
    assert rows.errors[0] is not None and "not finite" in rows.errors[0]
    assert rows.errors[1:] == [None, None]
    assert rows.token_ids.tolist()[1:] == logits[1:].argmax(dim=1).tolist()
    assert rows.logprobs[1] is not None


def test_random_logits_still_write_valid_json(compiler: GrammarCompiler, tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    sampler = make_sampler(compiler, vocab_size=compiler.vocab_size)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    for slot in range(3):
        sampling = SamplingParams(seed=slot, temperature=0.0 if slot == 0 else 1.0, grammar=grammar)
        admit(sampler, slot, sampling)
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    running = [0, 1, 2]
    for position in range(400):
        if not running:
            break
        logits = torch.stack([logits_at(position, vocab_size=compiler.vocab_size, seed=slot) for slot in running])
        rows = sampler.sample(logits, running)
        assert rows.errors == [None] * len(running)
        for slot, token in zip(list(running), rows.token_ids.tolist(), strict=True):
            if token == tokenizer.eos:
                running.remove(slot)
                sampler.release(slot)
            else:
                outputs[slot].append(token)
    assert not running
    for output in outputs.values():
        assert set(json.loads(tokenizer.decode(output))) == {"name", "ok"}


def test_a_complete_grammar_ends_the_output_even_before_min_tokens(compiler: GrammarCompiler, tokenizer: Any) -> None:
    sampler = make_sampler(compiler, vocab_size=compiler.vocab_size)
    grammar = Grammar(GrammarKind.REGEX, "a{1,3}")
    admit(sampler, 0, SamplingParams(temperature=0, min_tokens=9, grammar=grammar))
    logits = torch.zeros(1, compiler.vocab_size)
    logits[0, EOS] = 9.0
    tokens = [int(sampler.sample(logits.clone(), [0]).token_ids[0]) for _ in range(4)]
    assert tokens == [*tokenizer.encode("aaa"), EOS]


def test_a_grammar_that_fails_while_running_is_an_error_of_its_row(compiler: GrammarCompiler) -> None:
    sampler = make_sampler(compiler, vocab_size=compiler.vocab_size)
    admit(sampler, 0, SamplingParams(seed=0, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}')))
    admit(sampler, 1, SamplingParams(temperature=0))
    for _ in range(2):
        logits = torch.randn(2, compiler.vocab_size)
        rows = sampler.sample(logits, [0, 1])
        assert rows.errors[0] is not None and "json_schema" in rows.errors[0]
        assert rows.errors[1] is None
        assert rows.token_ids[1] == logits[1].argmax()


def test_admission_refuses_what_cannot_run(compiler: GrammarCompiler) -> None:
    bad = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a"))
    with pytest.raises(RequestError, match="unclosed") as raised:
        admit(make_sampler(compiler, vocab_size=compiler.vocab_size), 0, bad)
    assert raised.value.param == "grammar"
    with pytest.raises(Unsupported):
        admit(make_sampler(), 0, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a")))
    for sampling, param in (
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (SamplingParams(logprob_token_ids=(-1,)), "logprob_token_ids"),
    ):
        with pytest.raises(RequestError, match="vocabulary") as raised:
            admit(make_sampler(), 0, sampling)
        assert raised.value.param == param


def test_a_compiler_is_made_once_and_only_when_a_grammar_arrives(compiler: GrammarCompiler) -> None:
    made: list[GrammarCompiler] = []

    def factory() -> GrammarCompiler:
        made.append(compiler)
        return compiler

    sampler = Sampler(compiler.vocab_size, 4, device=CPU, grammars=factory)
    admit(sampler, 0, SamplingParams())
    assert made == []
    for slot in (1, 2):
        admit(sampler, slot, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a")))
    assert made == [compiler]


def test_a_slot_that_is_used_again_starts_afresh() -> None:
    sampler = make_sampler()
    admit(sampler, 0, SamplingParams(temperature=0, logit_bias={3: 100.0}, repetition_penalty=5.0, logprobs=1))
    generate(sampler, 0, 0, 5)
    sampler.release(0)
    admit(sampler, 0, SamplingParams(temperature=0))
    logits = torch.randn(1, VOCAB)
    rows = sampler.sample(logits, [0])
    assert rows.token_ids[0] == logits.argmax()
    assert rows.logprobs == [None]
