"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was found. mark: "ok"; "warn" for what limits Diptych here; "info" for what is merely absent."""

    section: str
    name: str
    value: str
    mark: Literal["ok", "warn", "info"] = "ok"
    note: str = ""
