"""Errors by the name of their class, as messages carry them."""

from __future__ import annotations

from diptych.errors import DiptychError, PromptTooLong, RankLost, error_of_kind
from diptych.transfer.rooms import RoomTaken


def test_error_of_kind_keeps_the_field_and_knows_the_unknown() -> None:
    error = error_of_kind("PromptTooLong", "long", "prompt")
    assert isinstance(error, PromptTooLong) and error.param == "prompt"
    assert type(error_of_kind("Martian", "x")) is DiptychError


def test_error_of_kind_finds_classes_of_other_modules_and_of_other_signatures() -> None:
    assert type(error_of_kind("RoomTaken", "x")) is RoomTaken
    assert type(error_of_kind("RankLost", "rank 1 is dead", "no field")) is RankLost
