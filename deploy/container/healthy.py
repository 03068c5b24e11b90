"""Exit with 0 if the server of the fleet in this folder answers over TLS; used by the container's health check."""

from __future__ import annotations

import http.client
import ssl
import sys
import tomllib
from pathlib import Path

_SECONDS = 20.0


def healthy(folder: Path) -> bool:
    """Ask ``GET /health`` on the loopback, trusting the fleet's own authority only."""
    server = tomllib.loads((folder / "fleet.toml").read_text(encoding="utf-8"))["server"]
    port = int(server["port"])
    trusted = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", port, timeout=_SECONDS, context=trusted)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    finally:
        connection.close()


if __name__ == "__main__":
    try:
        well = healthy(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        sys.exit(f"not healthy: {error}")
    sys.exit(0 if well else "not healthy: the server answered with an error")
