"""The safetensors files of a model folder: found, and their headers checked. Never imports torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from diptych.errors import ConfigError
from diptych.models.json_fields import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"
OTHER_FORMATS = ("pytorch_model*.bin", "*.pth", "*.gguf", "consolidated*.safetensors")


def find_safetensors(folder: Path) -> tuple[Path, ...]:
    """The files that hold the folder's weights: those of its index, else model.safetensors, else its only one.

    Raises ConfigError naming the file that is missing, truncated or damaged.
    """
    files = _listed_files(folder)
    for file in files:
        check_header(file)
    return files


def _listed_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    found = sorted(path for path in folder.glob("*.safetensors") if not path.match("consolidated*"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise ConfigError(
            f"{folder} holds {len(found)} safetensors files but no {INDEX_NAME}; download the index as well."
        )
    others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    hint = f"; it holds {', '.join(others)}, name the .gguf file itself or convert the others" if others else ""
    raise ConfigError(f"{folder} holds no safetensors weights{hint}. For random weights use --load-format dummy.")


def _indexed_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ConfigError(f"{index} has no weight_map from tensors to files; download it again.")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise ConfigError(f"{index} names files outside its folder: {', '.join(names)}.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} weight files that {INDEX_NAME} names: "
            f"{', '.join(missing)}. Finish the download."
        )
    return tuple(index.parent / name for name in names)


def check_header(file: Path) -> None:
    """Raise ConfigError unless the file is whole; the library compares header and offsets with its length."""
    try:
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConfigError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder.")
        with safe_open(file, framework="numpy"):
            pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error}); check its permissions.") from error
    except SafetensorError as error:
        raise ConfigError(
            f"{file} ({file.stat().st_size} bytes) is damaged or truncated: {error}. Download it again."
        ) from error
