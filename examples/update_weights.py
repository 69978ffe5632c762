"""A training loop that updates the model it samples from: no restart, and the engine goes on serving.

The policy is a tiny Qwen2 with random weights, trained by REINFORCE (Williams 1992) to say one token: rollouts come
from the engine, gradients from transformers, and after each step the engine gets the new weights. Runs in seconds on
a CPU:

    pip install diptych transformers && python update_weights.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from diptych import Engine

VOCAB = 32
WANTED = 7
PROMPT = [1, 5, 9]
NUM_ROLLOUTS = 32
LENGTH = 8


def make_policy(folder: Path) -> PreTrainedModel:
    """A random model, saved where an engine finds it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    policy = AutoModelForCausalLM.from_config(config)
    policy.save_pretrained(folder)
    Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    return policy


def rollouts(engine: Engine, step: int) -> torch.Tensor:
    """Sampled continuations, int64 [NUM_ROLLOUTS, LENGTH]."""
    sampling = {"max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}
    each = [{**sampling, "sampling_seed": step * NUM_ROLLOUTS + index} for index in range(NUM_ROLLOUTS)]
    answers = engine.generate(input_ids=[PROMPT] * NUM_ROLLOUTS, sampling_params=each)
    assert all(answer["meta_info"]["weight_version"] == f"step-{step}" for answer in answers)
    return torch.tensor([answer["output_ids"] for answer in answers])


def train_step(policy: PreTrainedModel, optimizer: torch.optim.Optimizer, sampled: torch.Tensor) -> float:
    """Make what brought more of the wanted token likelier. Returns: the mean reward."""
    rewards = (sampled == WANTED).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    token_ids = torch.cat((torch.tensor([PROMPT] * NUM_ROLLOUTS), sampled), dim=1)
    logits = policy(token_ids).logits[:, len(PROMPT) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, sampled.unsqueeze(2)).squeeze(2)
    loss = -(advantages.unsqueeze(1) * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        policy = make_policy(Path(name))
        optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
        with Engine(model_path=name, dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as engine:
            for step in range(steps):
                engine.update_weights_from_tensor(policy.state_dict().items(), weight_version=f"step-{step}")
                reward = train_step(policy, optimizer, rollouts(engine, step))
                if step % 10 == 0 or step == steps - 1:
                    print(f"step {step}: {reward:.0%} of the sampled tokens are the wanted one")


if __name__ == "__main__":
    main()
