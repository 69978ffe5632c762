"""Whether two engines hold the same weights, without reading all of them. Never imports torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from diptych.models.spec import ModelSpec

SAMPLE_NBYTES = 1024 * 1024


def fingerprint(spec: ModelSpec) -> str:
    """A word that differs if configuration or weights do: a hash of the config, and of each file's size and three
    samples.

    Where a file lies, and when it was written, does not matter.
    """
    digest = hashlib.blake2b(repr(spec.config).encode(), digest_size=12)
    digest.update(f"{spec.weight_format} {spec.seed if spec.weight_format == 'dummy' else ''}".encode())
    for path in spec.files:
        _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib.blake2b) -> None:
    nbytes = path.stat().st_size
    digest.update(str(nbytes).encode())
    with path.open("rb") as file:
        for offset in (0, nbytes // 2, max(0, nbytes - SAMPLE_NBYTES)):
            file.seek(offset)
            digest.update(file.read(SAMPLE_NBYTES))
