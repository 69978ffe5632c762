"""Text to token ids and back, for server, engine and grammars alike.

A thin typed wrapper over the `tokenizers` library. Owns where a tokenizer comes from (a folder, a tokenizer.json, a
GGUF file) and what the files around it add: special tokens, BOS in front of prompts, the chat template. Never imports
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers.processors import TemplateProcessing

from diptych.errors import ConfigError, RequestError
from diptych.gguf_file import GGUFFile, is_gguf
from diptych.gguf_tokenizer import tokenizer_from_gguf

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TokenizerSettings:
    """What surrounds a tokenizer.

    special_tokens: strings by role ("bos_token": "<s>"), for templates. chat_template: Jinja source. add_bos, add_eos:
    whether encoding adds them; None leaves it to the tokenizer: tokenizer.json says so itself, and beside it the
    add_bos_token of tokenizer_config.json does not count, as in transformers 5.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None


class Tokenizer:
    """One model's tokenizer. Immutable once built; any thread may use it.

    Args: backend: taken over; its truncation and padding are switched off.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self.special_tokens = dict(settings.special_tokens)
        self.chat_template = settings.chat_template
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_id = self._role_id("eos_token")
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._set_affixes(settings)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become those tokens.

        Args: add_special_tokens: put BOS (and whatever else the model expects) around it.
        Raises: RequestError if the text holds a lone surrogate, which no UTF-8 can carry.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        for text in texts:
            _check_text(text)
        return [item.ids for item in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        An id that the vocabulary lacks gives no text: a model's embedding may have more rows than it has tokens.
        Raises: RequestError for an id that no vocabulary has (below 0, above 2**32 - 1).
        """
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"token ids must be from 0 to {self.vocab_size - 1}: {error}.") from error

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (U+2581 for a space, "<0x0A>" for a byte), or None if there is none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """The whole tokenizer in the format of tokenizer.json, for libraries that read it."""
        return self._json

    @cached_property
    def _json(self) -> str:
        return self._backend.to_str()

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    def _set_affixes(self, settings: TokenizerSettings) -> None:
        """Make encoding add the BOS and EOS that the settings ask for, unless it does so anyway."""
        affixes = self._backend.encode("", add_special_tokens=True).ids
        has_bos = bool(affixes) and affixes[0] == self.bos_token_id
        has_eos = bool(affixes) and affixes[-1] == self.eos_token_id and (len(affixes) > 1 or not has_bos)
        wants_bos = has_bos if settings.add_bos is None else settings.add_bos and self.bos_token_id is not None
        wants_eos = has_eos if settings.add_eos is None else settings.add_eos and self.eos_token_id is not None
        if (wants_bos, wants_eos) == (has_bos, has_eos):
            return
        bos = [self.special_tokens["bos_token"]] if wants_bos else []
        eos = [self.special_tokens["eos_token"]] if wants_eos else []
        pieces = [*bos, "$A", *eos]
        ids = [(token, self._backend.token_to_id(token)) for token in dict.fromkeys(bos + eos)]
        self._backend.post_processor = TemplateProcessing(single=pieces, pair=[*pieces, "$B"], special_tokens=ids)


def load_tokenizer(model_path: str | Path, tokenizer_path: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a model: a folder with tokenizer.json, a tokenizer.json itself, or a GGUF file.

    Args: tokenizer_path: where to look instead of the model; the chat template still comes from the model if there is
    none there.
    Raises: ConfigError if there is no tokenizer, or it cannot be read.
    """
    source = Path(model_path if tokenizer_path is None else tokenizer_path).expanduser()
    backend, settings = _read(source)
    if settings.chat_template is None and tokenizer_path is not None:
        settings = _borrow_template(settings, Path(model_path).expanduser())
    return Tokenizer(backend, settings)


def _read(source: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    if is_gguf(source):
        file = GGUFFile(source)
        backend = tokenizer_from_gguf(file)
        return backend, _settings_from_gguf(file, backend)
    path = source / "tokenizer.json" if source.is_dir() else source
    if not path.is_file():
        raise ConfigError(
            f"there is no tokenizer at {path}; name a tokenizer.json or its folder with --tokenizer-path."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}. Download it again.") from error
    settings = _settings_from_folder(path.parent)
    backend.add_special_tokens(
        [token for token in settings.special_tokens.values() if backend.token_to_id(token) is not None]
    )
    return backend, settings


def _borrow_template(settings: TokenizerSettings, model_path: Path) -> TokenizerSettings:
    template = None
    if is_gguf(model_path):
        template = _gguf_template(GGUFFile(model_path))
    elif model_path.is_dir():
        template = _settings_from_folder(model_path).chat_template
    return TokenizerSettings(settings.special_tokens, template, settings.add_bos, settings.add_eos)


def _settings_from_folder(folder: Path) -> TokenizerSettings:
    config = _read_object(folder / "tokenizer_config.json")
    older = _read_object(folder / "special_tokens_map.json")
    special_tokens = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = config.get(key, older.get(key))
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special_tokens[key] = value
    return TokenizerSettings(special_tokens=special_tokens, chat_template=_folder_template(folder, config))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja beside the tokenizer wins over chat_template.json, which wins over tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{jinja} cannot be read ({error}); check it, or remove it.") from error
    template = _read_object(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again.")
    return content


def _settings_from_gguf(file: GGUFFile, backend: tokenizers.Tokenizer) -> TokenizerSettings:
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    special_tokens = {}
    for role, name in roles.items():
        token_id = file.integer(f"tokenizer.ggml.{name}_token_id")
        token = None if token_id is None else backend.id_to_token(token_id)
        if token is not None:
            special_tokens[f"{role}_token"] = token
    sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    add_bos = file.flag("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = sentencepiece or file.text("tokenizer.ggml.pre") == "llama-bpe"
    return TokenizerSettings(
        special_tokens=special_tokens,
        chat_template=_gguf_template(file),
        add_bos=add_bos,
        add_eos=bool(file.flag("tokenizer.ggml.add_eos_token")),
    )


def _gguf_template(file: GGUFFile) -> str | None:
    return file.text("tokenizer.chat_template")


def _check_text(text: str) -> None:
    match = SURROGATE.search(text)
    if match is not None:
        raise RequestError(
            f"the text holds the lone surrogate U+{ord(match[0]):04X} at position {match.start()}; "
            "send text that is valid Unicode."
        )
