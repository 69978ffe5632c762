"""How a body's rendezvous fields spread over its sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import RequestError
from diptych.server.rendezvous import expand
from diptych.server.schemas import RendezvousFields
from diptych.transfer.rooms import DEFAULT_BOOTSTRAP_PORT, Rendezvous

TOP = 2**63 - 1


def fields(**values) -> RendezvousFields:
    return RendezvousFields.model_validate(values)


def test_nothing_said_is_nothing_to_do():
    assert expand(fields(), [1, 2]) == [None, None, None]
    assert expand(fields(bootstrap_host=None, bootstrap_port=8998, bootstrap_room=None), [1]) == [None]


def test_scalars_hold_for_all_and_the_room_counts_up():
    found = expand(fields(bootstrap_host="p", bootstrap_port=None, bootstrap_room=TOP), [1, 2])
    assert found == [Rendezvous("p", DEFAULT_BOOTSTRAP_PORT, room) for room in (TOP, 0, 1)]


def test_lists_of_one_a_sequence():
    found = expand(fields(bootstrap_host=["p", "q"], bootstrap_port=[1, None], bootstrap_room=[5, 9]), [2])
    assert found == [Rendezvous("p", 1, 5), Rendezvous("q", DEFAULT_BOOTSTRAP_PORT, 9)]


def test_lists_of_one_a_prompt():
    found = expand(fields(bootstrap_host=["p", "q"], bootstrap_port=[1, 2], bootstrap_room=[50, 90]), [2, 3])
    assert found == [
        Rendezvous("p", 1, 50),
        Rendezvous("p", 1, 51),
        *(Rendezvous("q", 2, room) for room in (90, 91, 92)),
    ]


def test_a_ticket_lets_decode_drive():
    ticket = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 7, "remote_block_ids": [1], "x": {}}
    assert expand(fields(kv_transfer_params=ticket), [2]) == [Rendezvous("p", 7, None)] * 2
    assert expand(fields(kv_transfer_params={"do_remote_prefill": True, "remote_host": None}), [1]) == [None]
    assert expand(fields(kv_transfer_params={**ticket, "do_remote_prefill": False}), [1]) == [None]
    assert expand(fields(kv_transfer_params=ticket, bootstrap_host="q"), [1])[0].host == "q"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"bootstrap_room": 1}, "bootstrap_host"),
        ({"bootstrap_host": 3}, "bootstrap_host"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_host": {"a": 1}}, "bootstrap_host"),
        ({"bootstrap_host": ["p", "q", "r"]}, "bootstrap_host"),
        ({"bootstrap_host": "p", "bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_host": "p", "bootstrap_port": 1.5}, "bootstrap_port"),
        ({"bootstrap_host": "p", "bootstrap_port": True}, "bootstrap_port"),
        ({"bootstrap_host": "p", "bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": 2.0**80}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": "1"}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": [1, 1]}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": [1, 2, 3]}, "bootstrap_room"),
        ({"bootstrap_host": "p", "bootstrap_room": []}, "bootstrap_room"),
    ],
)
def test_bad_values_name_their_field(values, param):
    with pytest.raises(RequestError) as raised:
        expand(fields(**values), [1, 1])
    assert raised.value.param == param


ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none() | st.integers())
)


@given(
    host=ANY | st.just("p") | st.lists(st.text(max_size=2)),
    port=ANY,
    room=ANY,
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_anything_is_spread_or_refused(host, port, room, counts):
    """Property: whatever the fields hold, there is one place a sequence, or an error that names a field."""
    try:
        found = expand(fields(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room), counts)
    except RequestError as error:
        assert error.param in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        return
    assert len(found) == sum(counts)
    rooms = [place.room for place in found if place is not None and place.room is not None]
    assert len(set(rooms)) == len(rooms) and all(0 <= number <= TOP for number in rooms)
