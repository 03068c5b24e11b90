"""Whether the server can be found, reached and believed, and has the same time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fl_elastic.fleet.doctor.finding import Finding, Status, fail, ok, skipped, warn
from fl_elastic.fleet.health import Health
from fl_elastic.fleet.inventory import Server

__all__ = ["check_clock", "check_names", "check_server"]

_WARN_SECONDS, _FAIL_SECONDS = (
    60.0,
    300.0,
)  # Flower refuses signatures that are older than the latter


def check_names(known: Sequence[tuple[str, bool]]) -> Finding:
    """Return whether the addresses of the server mean something here.

    Parameters
    ----------
    known : sequence of (str, bool)
        Each address, and whether it can be resolved.
    """
    name = "name resolution"
    unknown = [address for address, found in known if not found]
    if not unknown:
        return ok(name, ", ".join(address for address, _ in known))
    seen = f"unknown here: {', '.join(unknown)}"
    remedy = "mend the name service or /etc/hosts, or add an IP address with fl-elastic fleet init"
    return fail(name, seen, remedy) if len(unknown) == len(known) else warn(name, seen, remedy)


def check_server(
    server: Server, answers: Sequence[tuple[str, Health]], missing: Status = "fail"
) -> Finding:
    """Return whether the server answers, with a certificate of the fleet's authority.

    Parameters
    ----------
    server : Server
        Its port, and whether it goes without TLS.
    answers : sequence of (str, Health)
        Each address that was asked, and what came back.
    missing : {"fail", "warn"}
        What it means if there is no answer: before the start of the server that is as it should be.
    """
    name = "server"
    way = "without TLS" if server.insecure else "over TLS"
    for address, health in answers:
        if health.ok:
            return ok(name, f"{address} port {server.port} is well, {way}")
    for address, health in answers:
        if health.certificate_error:
            return fail(
                name, f"{address} port {server.port}: certificate refused ({health.why})",
                "compare ca.crt with the fleet's folder, and check the clock; is it this fleet's server?",
            )  # fmt: skip
    if not answers:
        return skipped(name, "no address that means something")
    seen = "; ".join(f"{address} port {server.port}: {health.why}" for address, health in answers)
    remedy = "start it with fl-elastic fleet server DIR; check cable, firewall and port"
    return Finding(name, missing, seen, remedy)


def check_clock(answers: Sequence[tuple[str, Health]], now: datetime) -> Finding:
    """Return whether this clock and the server's agree, to the second that HTTP tells."""
    name = "clock"
    dates = [health.date for _, health in answers if health.date is not None]
    if not dates:
        return skipped(name, "the server does not answer, so there is nothing to compare with")
    seconds = (now - dates[0]).total_seconds()
    seen = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server"
    remedy = "synchronise it: timedatectl set-ntp true, and wait before the node starts"
    if abs(seconds) >= _FAIL_SECONDS:
        return fail(name, seen, remedy)
    if abs(seconds) >= _WARN_SECONDS:
        return warn(name, seen, remedy)
    return ok(name, seen)
