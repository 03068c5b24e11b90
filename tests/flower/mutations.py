"""Random changes of what travels and lies on disk, each the same for the same seed."""

from __future__ import annotations

import json
import random
from typing import Any

_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**62, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e308,
    float("nan"), float("inf"), "", "x", "\x00", "\n", "é" * 50, "9" * 5000, "x" * 100_000, [], {}, [[]],
    [1, 2, 3], {"a": {"b": 1}}, [None], "[" * 3000, "{}", '{"head": 1}', "nan", "fp32", "topk", "int8",
)  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    """Any value, of any type that JSON has, some of absurd size."""
    return rng.choice(_ODD)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut out, doubled, or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(changed) + 1)
        what = rng.randrange(5)
        if what == 0 and changed:
            changed[place % len(changed)] ^= 1 << rng.randrange(8)
        elif what == 1:
            del changed[place : place + rng.randrange(1, 40)]
        elif what == 2:
            changed[place:place] = rng.randbytes(rng.randrange(1, 40))
        elif what == 3:
            changed[place:place] = changed[place : place + rng.randrange(1, 200)]
        elif changed:
            changed[place % len(changed)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """The value with one thing in it, at any depth, replaced, left out, or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        what = rng.randrange(8)
        if what == 0:
            return {name: each for name, each in value.items() if name != key}
        if what == 1:
            return value | {str(odd_value(rng))[:50]: odd_value(rng)}
        return value | {key: mutated_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        what = rng.randrange(6)
        if what == 0:
            return value[:place] + value[place + 1 :]
        if what == 1:
            return value * rng.choice((2, 100))
        return [*value[:place], mutated_json(value[place], rng), *value[place + 1 :]]
    return odd_value(rng)


def as_text(value: Any) -> bytes:
    """JSON as a sender without scruples writes it."""
    return json.dumps(value).encode()
