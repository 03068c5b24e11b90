"""Published federated methods to compare with, each as the local training of one client."""

from fl_elastic_simulations.peers.base import PEERS, LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.fedel import FedEl
from fl_elastic_simulations.peers.ffa_lora import FfaLora
from fl_elastic_simulations.peers.flex_lora import FlexLora
from fl_elastic_simulations.peers.heterofl import HeteroFl
from fl_elastic_simulations.peers.random_parts import RandomBlocks, RandomLayers
from fl_elastic_simulations.peers.timelyfl import TimelyFl

__all__ = [
    "PEERS",
    "FedEl",
    "FfaLora",
    "FlexLora",
    "HeteroFl",
    "LocalResult",
    "LocalTask",
    "Peer",
    "RandomBlocks",
    "RandomLayers",
    "TimelyFl",
    "register_peer",
]
