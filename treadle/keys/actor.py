"""Who does an administrative act, for the audit log."""

from __future__ import annotations

import os
import pwd


def administrator() -> str:
    """The user of this process, and who became that user by sudo: ``root (sudo: alice)``."""
    behind = os.environ.get("SUDO_USER")
    return f"{_user()} (sudo: {behind})" if behind else _user()


def server_actor() -> str:
    """The server of this process's user."""
    return f"server of {_user()}"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
