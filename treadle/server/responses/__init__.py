"""The Responses API of OpenAI: a translation onto chat completions, and a bounded store."""
