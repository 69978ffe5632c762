"""Libraries that build on the openai SDK, against the demo model: langchain-openai and instructor."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """A class with few words, to which a small model cannot add properties of its own."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Paris", "Rome"]
    is_sunny: bool


QUESTION = "Is it sunny in Rome?"


@pytest.fixture
def langchain(server) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="demo", temperature=0, max_tokens=48, max_retries=0
    )


def test_langchain_streams_what_it_invokes(langchain):
    short = langchain.bind(max_tokens=8)
    whole = short.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in short.stream(QUESTION)) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain, method):
    assert isinstance(langchain.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(client: openai.OpenAI, mode):
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Weather,
        max_tokens=48,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(answer, Weather)
