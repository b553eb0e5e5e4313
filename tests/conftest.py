"""What holds for all tests: no server or command touches the key store of whoever runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A data folder of the tests, inherited by the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
