"""From logits to tokens: penalties, grammar masks, truncation, seeded sampling, logprobs. Device side."""
