"""Weight files of a folder: found, and refused when something is wrong with them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from diptych.models.safetensors_files import INDEX_NAME, find_safetensors


def test_single_file(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    assert find_safetensors(folder) == (folder / "model.safetensors",)


def test_the_only_file_under_another_name(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert find_safetensors(folder) == (folder / "weights.safetensors",)


def test_shards(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama", max_shard_size="100KB")
    files = find_safetensors(folder)
    assert len(files) > 1
    assert set(files) == set(folder.glob("*.safetensors"))


def test_missing_shard_is_named(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama", max_shard_size="100KB")
    victim = find_safetensors(folder)[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of the .*{victim.name}.*Finish the download"):
        find_safetensors(folder)


def test_shards_without_index(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama", max_shard_size="100KB")
    (folder / INDEX_NAME).unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors\.index\.json"):
        find_safetensors(folder)


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../x.safetensors"}}]
)
def test_damaged_index(content: dict[str, object], tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    (folder / INDEX_NAME).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=INDEX_NAME.replace(".", r"\.")):
        find_safetensors(folder)


def cut(content: bytes) -> bytes:
    return content[:-100]


def cut_header(content: bytes) -> bytes:
    return content[:50]


def huge_header(content: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + content[8:]


def scrambled_header(content: bytes) -> bytes:
    return content[:8] + b"x" * 100 + content[108:]


def nothing(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, cut_header, huge_header, scrambled_header, nothing])
def test_damaged_file_is_named(damage: Callable[[bytes], bytes], tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"model\.safetensors .*damaged or truncated.*Download it again"):
        find_safetensors(folder)


def test_git_lfs_pointer(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        find_safetensors(folder)


def test_other_formats_are_mentioned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no safetensors weights\. For random weights"):
        find_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"it holds pytorch_model\.bin"):
        find_safetensors(tmp_path)
