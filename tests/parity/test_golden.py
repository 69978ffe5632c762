"""The golden law: greedy output is transformers', whatever the batch, chunks, pages, cache hits, retractions and
overlap.

The demo model's expected tokens are in golden.json (see make_golden.py), and are checked here against the transformers
that is installed: a forward pass over prompt and output must find every output token the likeliest, which by induction
is what greedy generation says. Tiny random models of every architecture are generated from on the spot.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel

from diptych import LLM, SamplingParams

pytestmark = pytest.mark.timeout(400)  # a minute each at most, but not on a machine that is busy

FOLDER = Path(__file__).parent
NUM_NEW_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
CASES = {case["name"]: case for case in json.loads((FOLDER / "golden.json").read_text())["cases"]}
SHORT = [name for name, case in CASES.items() if len(case["prompt"]) <= 110]
BFLOAT16 = ["bos", "story-16", "story-33", "code", "unicode", "chat"]
ONE_BY_ONE = ["bos", "story-16", "unicode", "chat", "story-512"]
# float32 sums in another order differ in the sixth digit: logits closer than this are a tie, and golden.json has none.
TIE = 1e-3


def load_sibling(name: str) -> ModuleType:
    """Another file of this folder; tests are no package."""
    spec = importlib.util.spec_from_file_location(f"parity_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start(**options: object) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_memory": "512MiB", "check_invariants": True}
    return LLM("demo", **{**defaults, **options})


def assert_golden(llm: LLM, names: Iterable[str]) -> list[int]:
    """All at once. Returns: cached tokens of each."""
    names = list(names)
    completions = llm.generate([CASES[name]["prompt"] for name in names], GREEDY)
    wrong = [name for name, done in zip(names, completions, strict=True) if done.token_ids != CASES[name]["output"]]
    assert not wrong
    return [done.cached_tokens for done in completions]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Defaults: pages of 16, chunks of 1024, two steps in flight, prefix cache."""
    with start() as llm:
        yield llm


def test_prompts_are_what_they_claim():
    assert len(CASES) >= 13
    assert {len(case["prompt"]) for case in CASES.values()} >= {1, 15, 16, 17, 31, 33, 512, 513}
    assert len(CASES["whole-story"]["prompt"]) > 512 + NUM_NEW_TOKENS
    assert all(len(case["output"]) == NUM_NEW_TOKENS or case["output"][-1] == 1 for case in CASES.values())
    assert len({tuple(case["output"]) for case in CASES.values()}) > len(CASES) / 2


def test_all_at_once_and_again_from_the_cache(llm):
    llm.flush_cache()
    assert_golden(llm, CASES)
    cached = assert_golden(llm, CASES)
    # Whole pages, and never the last token: it has to be computed for its logits.
    assert cached == [(len(case["prompt"]) - 1) // 16 * 16 for case in CASES.values()]


def test_one_by_one(llm):
    llm.flush_cache()
    for name in ONE_BY_ONE:
        assert_golden(llm, [name])


def test_pages_go_on_from_an_output(llm):
    """A prompt that continues a finished answer, as the next turn of a chat does, takes the answer's pages."""
    case = CASES["story-100"]
    assert_golden(llm, ["story-100"])
    prompt, output = case["prompt"] + case["output"][:30], case["output"][30:]
    (done,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=len(output)))
    assert done.token_ids == output
    assert done.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_num_batched_tokens": 7, "page_size": 32, "max_inflight_steps": 1}, [*SHORT, "story-513"]),
        ({"max_num_batched_tokens": 64, "page_size": 1, "prefix_caching": False, "max_inflight_steps": 2}, CASES),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 5, "max_inflight_steps": 1}, SHORT),
    ],
    ids=["chunk-7-page-32-sync", "chunk-64-page-1-uncached", "five-slots-sync"],
)
def test_whatever_the_configuration(options, names):
    with start(**options) as llm:
        assert_golden(llm, names)


@pytest.mark.parametrize("inflight", [1, 2])
def test_retraction(inflight):
    """A pool that holds fewer tokens than all need: sequences give their pages back and are computed again."""
    names = [name for name in SHORT if len(CASES[name]["output"]) == NUM_NEW_TOKENS][:8]
    with start(kv_cache_memory="10MiB", prefix_caching=inflight == 2, max_inflight_steps=inflight) as llm:
        assert_golden(llm, names)
        load = llm.load()
        assert load.retractions_total > 0
        assert load.num_free_pages + load.num_cached_pages == load.num_pages


@cache
def reference(dtype: torch.dtype) -> PreTrainedModel:
    return load_sibling("make_golden").load_reference(dtype)


def gaps(dtype: torch.dtype, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """How far below transformers' likeliest token each output token is, in logits."""
    token_ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = reference(dtype)(token_ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return (logits.amax(dim=1) - chosen).tolist()


@pytest.mark.filterwarnings("default")  # what transformers warns of while it reads a GGUF file is not ours
def test_expected_tokens_are_those_of_the_transformers_installed():
    for name, case in CASES.items():
        assert max(gaps(torch.float32, case["prompt"], case["output"])) < TIE, name


@pytest.mark.filterwarnings("default")
def test_bfloat16():
    """Each token is transformers' own in bfloat16, or tied with it: logits there have 8 bits, so that ties are common.

    A logit between 16 and 32 moves in steps of an eighth, and what is summed in another order may end one step away.
    """
    with start(dtype="bfloat16") as llm:
        completions = llm.generate(
            [CASES[name]["prompt"] for name in BFLOAT16], SamplingParams(temperature=0.0, max_tokens=24)
        )
    found = [gap for done in completions for gap in gaps(torch.bfloat16, done.prompt_token_ids, done.token_ids)]
    assert len(found) == 24 * len(BFLOAT16)
    assert sum(gap == 0 for gap in found) >= 0.95 * len(found)
    assert max(found) <= 0.25


def save_tiny(case: str, folder: Path) -> PreTrainedModel:
    """The random model of test_models.py as a folder that can be served."""
    model: PreTrainedModel = load_sibling("test_models").reference_model(case)
    model.save_pretrained(folder)
    vocabulary = {f"t{token_id} ": token_id for token_id in range(model.config.vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0 ")).save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("case", load_sibling("test_models").CASES)
def test_tiny_models_of_every_architecture(case, tmp_path):
    model = save_tiny(case, tmp_path)
    prompts = [[5, *load_sibling("test_models").prompt(length - 1, seed=length)] for length in (1, 3, 4, 5, 23, 70)]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    layers, config = model.model.layers, model.config
    if "kv_lora_rank" in config.to_dict():
        row = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        row = 2 * layers[0].self_attn.k_proj.out_features
    page_nbytes = len(layers) * 4 * row * 4
    # 35 pages hold the longest sequence but not all six: some wait, some are retracted.
    pool = f"{-(-35 * page_nbytes // 1024)}KiB"
    options = {"dtype": "float32", "page_size": 4, "kv_cache_memory": pool, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), **options, num_threads=1, check_invariants=True) as llm:
        completions = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
        assert [done.token_ids for done in completions] == expected
