"""Ask a server for its health and its clock."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from fl_elastic.fleet.inventory import Server

_SECONDS = 5.0


@dataclass(frozen=True)
class Health:
    """A server's answer about its health, or the reason why there is none.

    Parameters
    ----------
    ok : bool
        Whether the server answered that it is healthy.
    why : str
        Why the server is not healthy; empty if it is.
    date : datetime, optional
        The server's time, to the second, with a time zone.
    certificate_error : bool
        Whether the server answered, but its certificate was not accepted.
    """

    ok: bool
    why: str = ""
    date: datetime | None = None
    certificate_error: bool = False


def ask_health(server: Server, address: str, ca: Path | None) -> Health:
    """Return the answer to ``GET /health``, trusting only the fleet's authority, without any proxy.

    Parameters
    ----------
    server : Server
        The server; its port is used.
    address : str
        Address of the server.
    ca : Path, optional
        Certificate of the authority; without it, the server's certificate is not checked.
    """
    try:
        connection = http.client.HTTPSConnection(
            address, server.port, timeout=_SECONDS, context=_context(ca)
        )
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
    except ssl.SSLCertVerificationError as error:
        return Health(False, error.verify_message or str(error), certificate_error=True)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Health(False, str(error) or type(error).__name__)
    date = _date(answer.headers.get("Date"))
    if answer.status != 200:
        return Health(False, f"it answered with status {answer.status}", date)
    return Health(True, date=date)


def _context(ca: Path | None) -> ssl.SSLContext:
    if ca is not None:
        return ssl.create_default_context(cafile=str(ca))
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _date(text: str | None) -> datetime | None:
    try:
        return None if text is None else parsedate_to_datetime(text)
    except ValueError:
        return None
