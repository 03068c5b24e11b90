"""Published federated methods to compare with, one file each, imported here: the local training of one client."""

from fl_elastic_simulations.peers.base import PEERS, LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.fedel import FedEl
from fl_elastic_simulations.peers.random_parts import RandomLayers
from fl_elastic_simulations.peers.timelyfl import TimelyFl

__all__ = [
    "PEERS",
    "FedEl",
    "LocalResult",
    "LocalTask",
    "Peer",
    "RandomLayers",
    "TimelyFl",
    "register_peer",
]
