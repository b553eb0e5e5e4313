"""Speculation: guess the next tokens, check them in one step, keep those that the model chooses itself."""
