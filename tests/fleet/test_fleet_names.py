"""What a person may type as a name, an address, a port or a setting."""

from __future__ import annotations

import pytest

from fl_elastic.errors import FleetError
from fl_elastic.fleet.names import (
    address_and_port,
    check_address,
    check_name,
    check_port,
    parse_setting,
    parse_settings,
)


@pytest.mark.parametrize("name", ["pi0", "a", "A-b-9", "x" * 32])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "pi_0", "-pi", "pi-", "../up", "a/b", "x" * 33, "pi 0", "pï", "pi0\n", "."]
)
def test_bad_names_are_refused_with_the_value(name: str) -> None:
    with pytest.raises(FleetError, match="letters, digits and dashes") as raised:
        check_name(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("server.lan", "server.lan"),
        ("Server.LAN.", "server.lan"),
        ("10.0.0.5", "10.0.0.5"),
        ("[::1]", "::1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("localhost", "localhost"),
    ],
)
def test_good_addresses(given: str, plain: str) -> None:
    assert check_address(given) == plain


@pytest.mark.parametrize(
    "address",
    ["", "server.lan:8000", "https://server.lan", "10.0.0.256", "a..b", "under_score.lan", "a b"],
)
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(FleetError, match="server address"):
        check_address(address)


@pytest.mark.parametrize("port", [0, -1, 65536, True])
def test_bad_ports_are_refused(port: int) -> None:
    with pytest.raises(FleetError, match="1 to 65535"):
        check_port(port)


def test_addresses_of_ipv6_get_brackets() -> None:
    assert address_and_port("::1", 8000) == "[::1]:8000"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=1", 1),
        ("k=1.5", 1.5),
        ("k=true", True),
        ('k="1"', "1"),
        ("k=/srv/data", "/srv/data"),
        ("k=a=b", "a=b"),
        ("k=", ""),
        ("k= x y ", "x y"),
    ],
)
def test_settings_are_toml_or_bare_words(text: str, value: object) -> None:
    assert parse_setting(text) == ("k", value)
    assert type(parse_setting(text)[1]) is type(value)


@pytest.mark.parametrize(
    "text", ["k", "=1", "a b=1", "k=[1]", "k={a=1}", "k=nan", "k=inf", "k=2020-01-01"]
)
def test_settings_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(FleetError, match="setting"):
        parse_setting(text)


def test_a_line_break_smuggles_in_no_second_setting() -> None:
    assert parse_settings(["k=1\nother=2"]) == {"k": "1\nother=2"}
