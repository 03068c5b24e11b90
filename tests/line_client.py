"""One who sends lines to a service, and reads its answers."""

from __future__ import annotations

import json
import socket
from typing import Any


class Client:
    """Sends JSON, or a line as it is."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.answers = self.connection.makefile()

    def ask(self, line: Any) -> Any:
        said = line if isinstance(line, (bytes, str)) else json.dumps(line)
        self.connection.sendall((said.encode() if isinstance(said, str) else said) + b"\n")
        return json.loads(self.answers.readline())

    def close(self) -> None:
        self.answers.close()
        self.connection.close()
