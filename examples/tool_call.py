"""The model calls a function of ours. `tool_choice` makes it: a base model would rarely do so by itself.

Start a server first (`diptych serve`), then: python examples/tool_call.py [URL]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=32,
        temperature=0,
    )
    for call in answer.choices[0].message.tool_calls:
        print(call.function.name, call.function.arguments)
        print(get_weather(**json.loads(call.function.arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
