"""How much of what an assistant may have; the pages say so beside each field."""

from __future__ import annotations

MAX_ASSISTANTS = 100  # of one user
MAX_NAME = 80
MAX_DESCRIPTION = 300
MAX_GREETING = 2_000
MAX_DOCUMENTS = 20
MAX_DOCUMENT_NAME = 120
MAX_FILE_BYTES = 1 << 20
MAX_CHARS = 1_000_000  # of system prompt and documents together
FORM_BYTES = 4 * MAX_CHARS + MAX_DOCUMENTS * MAX_FILE_BYTES // 4 + (1 << 20)
MAX_STOPS = 4
MAX_STOP_CHARS = 256
