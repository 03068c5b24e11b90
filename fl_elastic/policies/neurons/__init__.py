"""Freeze the neurons that have stopped changing: NEq, Velocity and SCoTTi."""

from __future__ import annotations

from fl_elastic.policies.neurons.policy import NeqPolicy
from fl_elastic.policies.neurons.scotti import ScottiPolicy
from fl_elastic.policies.neurons.velocity_policy import VelocityPolicy

__all__ = ["NeqPolicy", "ScottiPolicy", "VelocityPolicy"]
