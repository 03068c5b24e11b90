"""A ClientApp with hostile or broken nodes, to test how a server handles them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fl_elastic.flower.records import read_train_reply, train_reply
from fl_elastic.update import Manifest, PartialUpdate, decode
from fl_elastic.update.frame import MessageKind, unpack

Attack: TypeAlias = Callable[[PartialUpdate, Manifest], bytes]
"""Turns an honest update into the bytes that are sent instead."""


def hostile(
    app: ClientApp,
    attack: Attack | None,
    manifest: Manifest,
    bad: Collection[int],
    others: Attack | None = None,
) -> ClientApp:
    """Return an app whose bad nodes send attacked updates.

    Parameters
    ----------
    app : ClientApp
        The app that trains honestly.
    attack : callable or None
        The attack; None leaves all nodes honest.
    manifest : Manifest
        Manifest of the model.
    bad : collection of int
        Partition numbers of the bad nodes.
    others : callable, optional
        Change of the other nodes' updates.
    """
    if attack is None and others is None:
        return app
    wrapped = ClientApp()

    @wrapped.train()
    def train(message: Message, context: Context) -> Message:
        reply = app(message, context)
        changed = attack if context.node_config["partition-id"] in bad else others
        if changed is None or reply.has_error():
            return reply
        honest = read_train_reply(reply.content)
        packed = changed(decode(honest.packed, manifest), manifest)
        buffer = np.frombuffer(packed, np.uint8)
        content = train_reply([buffer], _examples(packed, manifest), honest.metrics)
        return Message(content, reply_to=message)

    @wrapped.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return app(message, context)

    return wrapped


def _examples(packed: bytes, manifest: Manifest) -> int:
    """Return the number of examples that a packed update claims; its reply must claim the same."""
    _, header, _ = unpack(packed, manifest, MessageKind.UPDATE)
    return int(header["num_examples"])
