"""Published federated methods to compare with, each as the local training of one client."""

from fl_elastic_simulations.peers.base import PEERS, LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.dfq import Dfq, FracTrainGated
from fl_elastic_simulations.peers.elastictrainer import PublishedElasticTrainer
from fl_elastic_simulations.peers.fedel import FedEl
from fl_elastic_simulations.peers.fedpart import FedPart
from fl_elastic_simulations.peers.fedquad import FedQuad
from fl_elastic_simulations.peers.fedrolex import FedRolex
from fl_elastic_simulations.peers.ffa_lora import FfaLora
from fl_elastic_simulations.peers.flex_lora import FlexLora
from fl_elastic_simulations.peers.flora import Flora
from fl_elastic_simulations.peers.fractrain import FracTrain
from fl_elastic_simulations.peers.full_steps import FullSteps
from fl_elastic_simulations.peers.heterofl import HeteroFl
from fl_elastic_simulations.peers.legend import Legend
from fl_elastic_simulations.peers.progfed import ProgFed
from fl_elastic_simulations.peers.published_selection import published_selection
from fl_elastic_simulations.peers.random_blocks import RandomBlocks
from fl_elastic_simulations.peers.random_layers import RandomLayers
from fl_elastic_simulations.peers.random_windows import RandomWindows
from fl_elastic_simulations.peers.timelyfl import TimelyFl

__all__ = [
    "PEERS",
    "Dfq",
    "FedEl",
    "FedPart",
    "FedQuad",
    "FedRolex",
    "FfaLora",
    "FlexLora",
    "Flora",
    "FracTrain",
    "FracTrainGated",
    "FullSteps",
    "HeteroFl",
    "Legend",
    "LocalResult",
    "LocalTask",
    "Peer",
    "ProgFed",
    "PublishedElasticTrainer",
    "RandomBlocks",
    "RandomLayers",
    "RandomWindows",
    "TimelyFl",
    "published_selection",
    "register_peer",
]
