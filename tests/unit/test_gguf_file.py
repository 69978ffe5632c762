"""The container: values of every type, and damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile, is_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint64("u64", 1 << 60)
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", -2.25)
    writer.add_bool("yes", True)
    writer.add_string("text", "na\u00efve \u2581")
    writer.add_array("words", ["a", "", "\u6f22\u5b57"])
    writer.add_array("counts", [3, 1, 2])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.arange(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_metadata_of_every_type(path: Path) -> None:
    file = GGUFFile(path)
    assert (file.integer("u8"), file.integer("i8"), file.integer("u64")) == (200, -3, 1 << 60)
    assert (file.number("f32"), file.number("f64"), file.number("u8")) == (1.5, -2.25, 200.0)
    assert (file.flag("yes"), file.text("text")) == (True, "na\u00efve \u2581")
    assert file.texts("words") == ["a", "", "\u6f22\u5b57"]
    assert file.numbers("counts").tolist() == [3, 1, 2]
    assert (file.array_len("words"), file.array_len("nothing"), file.is_array("u8")) == (3, 0, False)
    assert file.integer("nothing") is file.text("nothing") is file.flag("nothing") is file.number("nothing") is None
    assert "general.architecture" in set(file.keys())


def test_tensors(path: Path) -> None:
    file = GGUFFile(path)
    matrix = file.tensors["matrix"]
    assert (matrix.shape, matrix.kind, matrix.nbytes) == ((3, 4), gguf.GGMLQuantizationType.F32, 48)
    rows = file.rows(matrix)
    assert rows.shape == (3, 16)
    assert rows.view(np.float32).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not rows.flags.writeable
    assert file.rows(file.tensors["half"]).view(np.float16).tolist() == [list(range(8))]


def test_released_tensors_can_be_read_again(tmp_path: Path) -> None:
    values = np.arange(1 << 16, dtype=np.float32).reshape(16, -1)
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    writer.add_tensor("large", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "large.gguf")
    tensor = file.tensors["large"]
    rows = file.rows(tensor)
    for _ in range(2):
        assert np.array_equal(rows.view(np.float32), values)
        file.release(tensor)


@pytest.mark.parametrize(
    ("read", "complaint"),
    [
        (lambda file: file.integer("text"), r"text is .*, not an integer"),
        (lambda file: file.integer("yes"), "yes is True, not an integer"),
        (lambda file: file.number("text"), "not a number"),
        (lambda file: file.flag("u8"), "not a boolean"),
        (lambda file: file.text("u8"), "not a string"),
        (lambda file: file.integer("counts"), "counts is an array"),
        (lambda file: file.texts("counts"), "not an array of strings"),
        (lambda file: file.numbers("words"), "not an array of numbers"),
        (lambda file: file.texts("nothing"), "no array nothing"),
    ],
)
def test_values_of_another_type_are_refused(read: object, complaint: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(GGUFFile(path))  # type: ignore[operator]


def test_truncation_anywhere_is_a_config_error(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, len(content) - 16, 7):  # the last tensor takes its 16 bytes; padding may follow
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"small\.gguf"):
            GGUFFile(path)


def damaged(content: bytes, position: int, patch: bytes) -> bytes:
    return content[:position] + patch + content[position + len(patch) :]


@pytest.mark.parametrize(
    ("position", "patch", "complaint"),
    [
        (0, b"GGML", "begins with"),
        (4, struct.pack("<I", 1), "format version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 62), "ends early or is damaged|0 dimensions"),
        (16, struct.pack("<Q", 1 << 62), "ends early or is damaged"),
        (24, struct.pack("<Q", 1 << 63), "ends early or is damaged"),
    ],
)
def test_damaged_headers(position: int, patch: bytes, complaint: str, path: Path) -> None:
    path.write_bytes(damaged(path.read_bytes(), position, patch))
    with pytest.raises(ConfigError, match=complaint):
        GGUFFile(path)


def test_damaged_tensor_entries(path: Path) -> None:
    content = path.read_bytes()
    entry = content.index(b"matrix") + len(b"matrix")  # then: dimensions, two lengths, kind, offset
    for position, patch, complaint in (
        (entry, struct.pack("<I", 9), "9 dimensions"),
        (entry + 4, struct.pack("<Q", 0), "empty shape"),
        (entry + 4, struct.pack("<Q", 1 << 40), "ends at byte"),
        (entry + 20, struct.pack("<I", 250), "unknown type number 250"),
        (entry + 20, struct.pack("<I", 12), "rows of 4 elements"),
        (entry + 24, struct.pack("<Q", 1 << 40), "ends at byte"),
    ):
        path.write_bytes(damaged(content, position, patch))
        with pytest.raises(ConfigError, match=complaint):
            GGUFFile(path)


def test_split_models_are_refused_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="gguf-split --merge"):
        GGUFFile(file)


def test_is_gguf(path: Path, tmp_path: Path) -> None:
    assert is_gguf(path) and is_gguf(path.rename(tmp_path / "model.bin"))
    other = tmp_path / "x.txt"
    other.write_text("hello")
    assert not is_gguf(other) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "nowhere")


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        GGUFFile(tmp_path / "nowhere.gguf")
