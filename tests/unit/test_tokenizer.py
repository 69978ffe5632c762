"""Tokenizers from folders and GGUF files, against the tokenizers that transformers builds."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from diptych.errors import ConfigError, RequestError
from diptych.tokenizer import Tokenizer, TokenizerSettings, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
    "def f(x):\n    return [y ** 2 for y in x if y != 0]\n",
    "na\u00efve caf\u00e9 \u00fcber stra\u00dfe \u6f22\u5b57 \u3053\u3093\u306b\u3061\u306f",
    "\ud55c\uad6d\uc5b4 \u0416\u0416",
    "<|user|>hello<|end|> world",
] * 3

PIECES = [
    *"abcXYZ 0123456789\n\t\r .,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`",
    *"\u00e9\u00fc\u00df\u6f22\u5b57\u3053\ud55c\u0416\u0301\u200d\ufffd\u2581\x00\U0001f642\U0001f469\u200d\U0001f467",
    *["  ", "    ", "\n\n\n", "\t\t", " the", "tion", "'s", "12345", "<|user|>", "<|end|>", "<s>"],
    *["<table>", "<eos>"],
    *["<start_of_turn>", "<0x0A>", "<unused5>", "def f(x):\n    return x", "\U0001f1e9\U0001f1ea"],
]


def texts(count: int) -> list[str]:
    chance = random.Random(7)
    return ["".join(chance.choices(PIECES, k=chance.randint(0, 40))) for _ in range(count)]


def assert_same(ours: Tokenizer, theirs: PreTrainedTokenizerBase, samples: list[str]) -> None:
    for text in samples:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), repr(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), repr(text)
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, repr(text)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(demo_model)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_equals_transformers(demo_model: Path, demo_tokenizer: Tokenizer) -> None:
    """Half a minute, nearly all of it transformers'."""
    theirs = AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name)
    assert_same(demo_tokenizer, theirs, [*CORPUS, *texts(200)])
    assert demo_tokenizer.vocab_size == len(theirs) == 262144


def test_demo(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.vocab_size == 262144
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_id) == (2, 1)
    assert demo_tokenizer.special_tokens["bos_token"] == "<bos>"
    assert demo_tokenizer.chat_template is None
    assert demo_tokenizer.encode("Hello  world\n\n\t x") == [2, 9259, 138, 12392, 108, 255968, 1123]
    assert demo_tokenizer.decode([2, 9259, 138, 12392]) == "Hello  world"
    assert demo_tokenizer.decode([2, 9259], skip_special_tokens=False) == "<bos>Hello"
    assert {0, 1, 2, 3, 105, 106} <= demo_tokenizer.special_ids
    assert 107 not in demo_tokenizer.special_ids  # a newline: matched whole, but plain text
    assert demo_tokenizer.id_to_token(9259) == "Hello" and demo_tokenizer.token_to_id("<eos>") == 1
    assert demo_tokenizer.id_to_token(262144) is demo_tokenizer.id_to_token(-1) is None


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_demo_round_trip(demo_tokenizer: Tokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert demo_tokenizer.decode(ids[1:], skip_special_tokens=False) == text.replace("\u2581", " ")
    assert demo_tokenizer.encode_batch([text, text]) == [ids, ids]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d \ude42"])
def test_lone_surrogates_are_the_requests_fault(text: str, demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D[8-F]"):
        demo_tokenizer.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        demo_tokenizer.encode_batch(["fine", text])


def test_ids_outside_the_vocabulary(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.decode([9259, 262144, 2**31]) == "Hello"
    for token_id in (-1, 2**40):
        with pytest.raises(RequestError, match="token ids must be from 0 to 262143"):
            demo_tokenizer.decode([token_id])


def test_threads_share_a_tokenizer(demo_tokenizer: Tokenizer) -> None:
    samples = texts(40)
    expected = [demo_tokenizer.encode(text) for text in samples]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([demo_tokenizer.encode(text) for text in samples])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def byte_level_backend() -> Backend:
    """A small byte-level BPE with two special tokens, trained here."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder: Path, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **values}))


def test_folder_equals_transformers(folder: Path) -> None:
    configure(folder, bos_token="<s>", eos_token={"__type": "AddedToken", "content": "</s>"}, add_bos_token=True)
    ours = load_tokenizer(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert_same(ours, theirs, [*CORPUS, *texts(200)])


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("had_bos", [False, True])
def test_affixes(add_bos: bool, add_eos: bool, had_bos: bool) -> None:
    backend = byte_level_backend()
    if had_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(backend, TokenizerSettings(special, add_bos=add_bos, add_eos=add_eos))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0] * add_bos + plain + [1] * add_eos


def test_named_special_tokens_are_special(folder: Path) -> None:
    word = load_tokenizer(folder).encode("the")
    assert len(word) == 1
    configure(folder, eos_token="the")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == word[0] and word[0] in tokenizer.special_ids
    assert tokenizer.decode([*word, *tokenizer.encode("fox")]) == "fox"


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("a")) == 1
    assert len(tokenizer.encode("a b c d e f")) > 3


def test_json_rebuilds_the_same_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    again = Backend.from_str(tokenizer.to_json())
    for text in texts(50):
        assert again.encode(text).ids == tokenizer.encode(text)


def test_chat_templates_by_precedence(folder: Path) -> None:
    assert load_tokenizer(folder).chat_template is None
    configure(folder, chat_template="config")
    assert load_tokenizer(folder).chat_template == "config"
    configure(folder, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert load_tokenizer(folder).chat_template == "d"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_tokenizer(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(folder).chat_template == "jinja"


def test_tokenizer_path_wins_but_the_model_lends_its_template(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "chat_template.jinja").write_text("of the model")
    assert load_tokenizer(model, folder).chat_template == "of the model"
    assert load_tokenizer(model, folder / "tokenizer.json").vocab_size == load_tokenizer(folder).vocab_size


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(folder)


def write_gguf(
    path: Path, backend: Backend, *, kind: str, pre: str, scores: list[float] | None = None, **flags: bool
) -> Path:
    """A GGUF file that holds nothing but this tokenizer."""
    content = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    types = [gguf.TokenType.CONTROL if special.get(token) else gguf.TokenType.NORMAL for token in tokens]
    types = [
        gguf.TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is None:
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    else:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_chat_template("{{ messages }}")
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_gguf_equals_transformers(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_backend(), kind="gpt2", pre=pre, add_bos_token=True)
    ours = load_tokenizer(path)
    samples = [*CORPUS, *texts(300)]
    if pre == "qwen2":  # whose text is composed first, which transformers' conversion leaves out
        samples = [normalizers.NFC().normalize_str(text) for text in samples]
    assert ours.chat_template == "{{ messages }}"
    assert_same(ours, AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf"), samples)


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t.gguf", byte_level_backend(), kind="gpt2", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def sentencepiece_backend() -> Backend:
    """A small BPE over characters with SentencePiece's space and byte tokens."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.mark.parametrize("add_space_prefix", [None, True])
def test_sentencepiece_gguf_equals_transformers(add_space_prefix: bool | None, tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    scores = [-float(index) for index in range(backend.get_vocab_size())]
    flags = {} if add_space_prefix is None else {"add_space_prefix": add_space_prefix}
    path = write_gguf(tmp_path / "t.gguf", backend, kind="llama", pre="default", scores=scores, **flags)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    assert ours.encode("hello")[0] == ours.bos_token_id
    assert_same(ours, theirs, [*CORPUS, *texts(300)])


def test_unknown_gguf_tokenizers_are_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    with pytest.raises(ConfigError, match="rule 'klingon', which is not supported"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", backend, kind="gpt2", pre="klingon"))
    with pytest.raises(ConfigError, match="kind 't5'"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", backend, kind="t5", pre="default"))
