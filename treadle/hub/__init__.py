"""Where models come from: the catalogue, Hugging Face, ModelScope, any URL, or a path.

Nothing here opens a connection for a model that is on this machine.
"""

from treadle.hub.hub import check, list_models, pull, resolve
from treadle.hub.store import Model

__all__ = ["Model", "check", "list_models", "pull", "resolve"]
