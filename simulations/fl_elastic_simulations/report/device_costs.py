"""What methods take of each device class: bytes of a step beside the limit, joules of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fl_elastic_simulations.report.formats import MISSING, bytes_text, joules_text
from fl_elastic_simulations.report.summary import DeviceClass, Method, Results
from fl_elastic_simulations.report.table import Grid

__all__ = ["energy_grid", "memory_grid"]


def memory_grid(results: Results) -> Grid | None:
    """Return a row per device class: its memory limit, and the largest step of each method; or None."""
    return _by_class(
        results,
        "Limit",
        lambda device: "none" if device.memory_bytes is None else bytes_text(device.memory_bytes),
        lambda method: method.peaks,
        bytes_text,
    )


def energy_grid(results: Results) -> Grid | None:
    """Return a row per device class whose power is given: watts, and joules of a round under each method."""
    return _by_class(
        results,
        "Power",
        lambda device: MISSING if device.watts is None else f"{device.watts:g} W",
        lambda method: method.joules,
        joules_text,
    )


def _by_class(
    results: Results,
    heading: str,
    given: Callable[[DeviceClass], str],
    found: Callable[[Method], Mapping[str, float | None]],
    written: Callable[[float | None], str],
) -> Grid | None:
    """Return the classes of which any method knows something, a column per method after what is given."""
    rows = tuple(
        (
            device.label,
            given(device),
            *(written(found(m).get(device.name)) for m in results.methods),
        )
        for device in results.devices
        if any(found(method).get(device.name) is not None for method in results.methods)
    )
    names = (method.name for method in results.methods)
    return Grid(("Device", heading, *names), rows) if rows else None
