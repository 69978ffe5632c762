"""An answer that fits a class: its JSON schema constrains the model, so that parsing cannot fail.

Start a server first (`diptych serve`), then: python examples/structured_output.py [URL]
"""

from __future__ import annotations

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    """What we want to know of a review."""

    mood: Literal["glad", "angry", "bored"]
    stars: int = Field(ge=1, le=5)


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Sum up this review: I loved every page of it!"}],
        response_format=Review,
        max_tokens=64,
        temperature=0,
    )
    print(answer.choices[0].message.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
