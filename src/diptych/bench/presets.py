"""Fixed sets of cases, so that figures of different days, machines and engines can be compared.

`cpu` is the project's CPU table; `h200` are the cases for one large GPU and a model of 8 billion parameters. What a
preset asks for must not change once figures have been published with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from diptych.bench.workload import (
    BenchRequest,
    Case,
    Headline,
    LengthRange,
    SyntheticSpec,
    Vocabulary,
    synthetic_requests,
)
from diptych.errors import ConfigError

# Ordinary text in every vocabulary of 128k tokens or more.
_LARGE_VOCABULARY = (1000, 120_000)


def cpu_cases(vocabulary: Vocabulary, seed: int) -> Iterator[Case]:
    """Single stream, prefill, an offline batch, and decode at batch 32 with a context of about 256 tokens."""

    def requests(num_prompts: int, input_len: LengthRange, output_len: LengthRange) -> tuple[BenchRequest, ...]:
        nonlocal seed
        seed += 1  # no two rounds share a prompt
        spec = SyntheticSpec(num_prompts=num_prompts, input_len=input_len, output_len=output_len, seed=seed)
        return synthetic_requests(spec, vocabulary)

    def fixed(num_prompts: int, input_len: int, output_len: int) -> tuple[BenchRequest, ...]:
        return requests(num_prompts, LengthRange(input_len, input_len), LengthRange(output_len, output_len))

    yield Case(
        name="single_stream",
        rounds=tuple(fixed(1, 128, 128) for _ in range(3)),
        headline=Headline.DECODE_RATE,
    )
    yield Case(
        name="prefill_1024",
        rounds=tuple(fixed(1, 1024, 1) for _ in range(7)),
        headline=Headline.INPUT_RATE,
    )
    yield Case(
        name="offline_32",
        rounds=(requests(32, LengthRange(128, 512), LengthRange(64, 128)),),
        headline=Headline.OUTPUT_RATE,
    )
    # From 224 to 288 tokens of context: 256 in the middle of what is measured.
    yield Case(name="decode_32", rounds=(fixed(32, 224, 64),), headline=Headline.DECODE_RATE)


def h200_cases() -> Iterator[Case]:
    """Latency, prefill, throughput, a large decode batch, mixed lengths and a shared prefix.

    One random stream runs through all cases in this order, so that other programs can reproduce the token ids.
    """
    source = random.Random(7)

    def prompt(num_tokens: int) -> list[int]:
        return [source.randrange(*_LARGE_VOCABULARY) for _ in range(num_tokens)]

    def uniform(name: str, shape: tuple[int, int, int], headline: Headline) -> Case:
        num_prompts, input_len, output_len = shape
        requests = tuple(BenchRequest(prompt(input_len), output_len) for _ in range(num_prompts))
        return Case(name=name, rounds=(requests,), headline=headline)

    def clipped(mean: float, deviation: float, high: int) -> int:
        return min(high, max(8, int(source.lognormvariate(mean, deviation))))

    yield uniform("batch1_decode", (1, 128, 512), Headline.MS_PER_TOKEN)
    yield uniform("prefill_8k", (48, 8192, 1), Headline.INPUT_RATE)
    yield uniform("tput_1024_256", (512, 1024, 256), Headline.OUTPUT_RATE)
    yield uniform("decode_bs256", (256, 64, 512), Headline.OUTPUT_RATE)
    mixed = tuple(BenchRequest(prompt(clipped(5.2, 1.1, 4096)), clipped(5.0, 0.9, 1024)) for _ in range(1000))
    yield Case(name="mixed_1000", rounds=(mixed,))
    prefix = prompt(2048)
    shared = tuple(BenchRequest(prefix + prompt(128), 64) for _ in range(256))
    yield Case(name="shared_prefix", rounds=(shared,))


def choose_cases(cases: Iterator[Case], names: str | None) -> list[Case]:
    """Those that a comma-separated list names, in the preset's order; None is all. Raises: ConfigError."""
    every = list(cases)
    if names is None:
        return every
    wanted = {name.strip() for name in names.split(",")}
    known = [case.name for case in every]
    if unknown := sorted(wanted - set(known)):
        raise ConfigError(f"--cases names {unknown[0]!r}; this preset has {', '.join(known)}")
    return [case for case in every if case.name in wanted]
