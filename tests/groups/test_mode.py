"""Modes name themselves, and say what they train."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind

LAYER = TensorGroup("layer", ("layer.weight", "layer.bias"), ((8, 4, 3, 3), (8,)), GroupKind.CONV)

MODES = st.one_of(
    st.sampled_from([Mode.FROZEN, Mode.BIAS, Mode.FULL]),
    st.builds(
        lambda parts, axis: Mode.channels(1 / parts, axis=axis),
        st.integers(1, 64), st.sampled_from(["in", "out"]),
    ),
    st.builds(lambda patch, inputs: Mode.filtered(patch, inputs=inputs), st.integers(1, 9), st.booleans()),
)  # fmt: skip


@given(mode=MODES)
def test_a_mode_is_read_from_what_it_is_called(mode: Mode) -> None:
    assert Mode.parse(str(mode)) == mode


def test_modes_are_called_short_names() -> None:
    modes = [Mode.channels(1 / 8, axis="out"), Mode.channels(0.4), Mode.filtered(4, inputs=True)]
    assert [str(mode) for mode in modes] == ["out/8", "in/2.5", "wx4"]


@pytest.mark.parametrize("text", ["", "FULL", "in", "in/0.5", "out/0", "w", "wx-2", "half", "w0"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Mode.parse(text)


@pytest.mark.parametrize(
    "wrong", [{"kind": "some"}, {"kind": "channels", "fraction": 0.0}, {"kind": "channels", "fraction": 1.5},
              {"kind": "channels", "axis": "up"}, {"kind": "filtered", "patch": 0}],
)  # fmt: skip
def test_impossible_modes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Mode(**wrong)  # type: ignore[arg-type]


def test_what_a_mode_trains() -> None:
    assert Mode.FROZEN.trains(LAYER) == () and Mode.FROZEN.is_frozen
    assert Mode.BIAS.trains(LAYER) == ("layer.bias",)
    for mode in (Mode.FULL, Mode.channels(0.5), Mode.filtered(2)):
        assert mode.trains(LAYER) == LAYER.parameters and not mode.is_frozen
    assert [Mode.channels(0.3).channel_count(n) for n in (1, 3, 4, 100)] == [1, 1, 1, 30]
