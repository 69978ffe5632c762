"""A chat over HTTP with the openai SDK, streamed.

Start a server first (`diptych serve`), then: python examples/chat_openai.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            print(event.choices[0].delta.content or "", end="", flush=True)
        elif event.usage:
            print(f"\n({event.usage.prompt_tokens} tokens in, {event.usage.completion_tokens} out)")


if __name__ == "__main__":
    main(*sys.argv[1:])
