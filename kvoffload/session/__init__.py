"""Session files: the blocks of a conversation in a file, for any cache with the same model. docs/session-format.md."""

from kvoffload.session.session_file import read_tokens
from kvoffload.session.session_folder import SessionFolder

__all__ = ["SessionFolder", "read_tokens"]
