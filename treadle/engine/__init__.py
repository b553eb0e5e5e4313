"""The engine: scheduler, KV blocks and prefix cache around a step runner, in a process of its own."""
