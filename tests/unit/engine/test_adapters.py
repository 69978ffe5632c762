"""What is said of a name that is taken: it depends on what becomes of the adapter that has it."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from diptych.core.calls import AdapterFacts
from diptych.core.messages import AddAdapter, RemoveAdapter
from diptych.engine.adapters import Adapters
from diptych.errors import AdapterError
from diptych.scheduler.adapter_slots import AdapterSlots
from diptych.scheduler.groups import AnyScheduler


class IdleScheduler:
    """What a load and an unload ask of a scheduler."""

    is_idle = True

    def __init__(self) -> None:
        self.adapters = AdapterSlots(2)


def test_a_taken_name_is_refused_with_what_to_do() -> None:
    adapters = Adapters(cast("AnyScheduler", IdleScheduler()), 2)

    def refusal() -> str:
        with pytest.raises(AdapterError) as caught:
            next(adapters.script(AddAdapter(2, "one", "/other")))
        return str(caught.value)

    load = adapters.script(AddAdapter(1, "one", "/one"))
    next(load)  # the files are being read
    assert refusal() == "adapter 'one' is being loaded already; wait for it"
    next(load)  # an idle engine waits for them at once
    with pytest.raises(StopIteration):
        load.send(msgspec.msgpack.encode(AdapterFacts(digest="d", rank=4, nbytes=1)))
    assert refusal() == "adapter 'one' is loaded already; unload it first"
    next(adapters.script(RemoveAdapter(3, "one")))
    assert refusal() == "adapter 'one' is being unloaded: its last requests are running; wait for them, or abort them"
