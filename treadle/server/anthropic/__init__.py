"""The Messages API of Anthropic: a translation onto chat completions."""
