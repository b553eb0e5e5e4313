"""How good a model's predictions are: perplexity over a text, and divergence from a reference."""
