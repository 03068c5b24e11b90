"""The devices of which a simulated fleet consists."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from fl_elastic.errors import ScenarioError
from fl_elastic.registry import closest

OVERRIDABLE = (
    "slowdown",
    "uplink_bytes_per_second",
    "downlink_bytes_per_second",
)


@dataclass(frozen=True)
class Device:
    """One kind of device: its speed and bandwidth.

    Parameters
    ----------
    name : str
        Short name used in scenarios ("pi_zero_2_w").
    label : str
        Name for tables and plots.
    slowdown : float
        Training step time relative to the host that measured (1.0); bigger is slower. The
        catalogue's reference is one core of a modern x86 server: a rough, relative figure.
    uplink_bytes_per_second, downlink_bytes_per_second : float
        Bandwidth of the device's own link, to and from the server.

    Examples
    --------
    >>> Device("board", "A board", 2.0, 1e6, 1e6).slowdown
    2.0
    """

    name: str
    label: str
    slowdown: float
    uplink_bytes_per_second: float
    downlink_bytes_per_second: float


@cache
def catalogue() -> Mapping[str, Device]:
    """Return the known devices by name, in the order of the catalogue, which names the sources of figures.

    Examples
    --------
    >>> list(catalogue())
    ['pi_zero_2_w', 'pi_3b_plus', 'pi_4b', 'pi_5', 'jetson_nano', 'laptop']
    """
    text = resources.files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    figures = ("label", *OVERRIDABLE)
    return {
        name: Device(name, **{figure: entry[figure] for figure in figures})
        for name, entry in tomllib.loads(text).items()
    }


def device(
    name: str,
    *,
    slowdown: float | None = None,
    uplink_bytes_per_second: float | None = None,
    downlink_bytes_per_second: float | None = None,
) -> Device:
    """Return the known device ``name``, with some of its figures replaced.

    Parameters
    ----------
    name : str
        A name of the catalogue.
    slowdown, uplink_bytes_per_second, downlink_bytes_per_second : float, optional
        Figures that replace those of the catalogue.

    Raises
    ------
    ScenarioError
        If the device is unknown.

    Examples
    --------
    >>> device("pi_5", slowdown=3.0).slowdown
    3.0
    >>> device("pi_6")
    Traceback (most recent call last):
    fl_elastic.errors.ScenarioError: unknown device 'pi_6' (did you mean 'pi_5'?): known are \
pi_zero_2_w, pi_3b_plus, pi_4b, pi_5, jetson_nano, laptop
    """
    known = catalogue()
    if name not in known:
        raise ScenarioError(
            f"unknown device {name!r}{closest(str(name), list(known))}: "
            f"known are {', '.join(known)}"
        )
    given = zip(
        OVERRIDABLE, (slowdown, uplink_bytes_per_second, downlink_bytes_per_second), strict=True
    )
    changed = {figure: value for figure, value in given if value is not None}
    return replace(known[name], **changed)  # type: ignore[arg-type]


def told_apart(
    devices: Sequence[Device], figures: Sequence[Mapping[str, float | str | None]]
) -> list[Device]:
    """Return the devices; to those with the same name, name and label get what distinguishes them.

    Parameters
    ----------
    devices : sequence of Device
        Devices of the entries of a fleet.
    figures : sequence of mapping
        Distinguishing figures of each entry's clients, by their names for readers; a text is shown as it is, None
        means no limit. Entries with equal figures are one class.

    Examples
    --------
    >>> figures = [{"slowdown": 2.0, "memory": None}, {"slowdown": 8.0, "memory": None}]
    >>> [entry.name for entry in told_apart([device("pi_5"), device("pi_5")], figures)]
    ['pi_5, slowdown 2', 'pi_5, slowdown 8']
    """
    found = []
    for entry, own in zip(devices, figures, strict=True):
        alike = [f for d, f in zip(devices, figures, strict=True) if d.name == entry.name]
        differing = [name for name in own if len({f[name] for f in alike}) > 1]
        said = "".join(f", {_said(name, own[name])}" for name in differing)
        found.append(replace(entry, name=entry.name + said, label=entry.label + said))
    return found


def _said(name: str, value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return f"no limit of {name}" if value is None else f"{name} {value:.10g}"
