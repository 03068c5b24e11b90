"""Which tensor groups to train: the exact solver, and the policies that call it."""

from fl_elastic.groups import Mode
from fl_elastic.planning.elastic import ElasticPolicy
from fl_elastic.planning.fixed import BiasPolicy, FullPolicy, HeadPolicy, LastKPolicy
from fl_elastic.planning.gradient_filter import GradientFilterPolicy
from fl_elastic.planning.joint import Choices, JointSelection, Limits, joint_knapsack
from fl_elastic.planning.joint_policy import JointPolicy
from fl_elastic.planning.knapsack import Selection, prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import (
    PlanRequest,
    Policy,
    make_policy,
    policies,
    register_policy,
)
from fl_elastic.planning.published_schemes import PUBLISHED_MODELS, PublishedModel, Scheme
from fl_elastic.planning.random import RandomPolicy
from fl_elastic.planning.scheme_search import (
    Contributions,
    SchemeCosts,
    fit_contributions,
    scheme_costs,
    search_scheme,
)
from fl_elastic.planning.sparse_update import SparseUpdatePolicy
from fl_elastic.planning.tinytrain import (
    TinyTrainInputPolicy,
    TinyTrainKnapsackPolicy,
    TinyTrainNoDepthwisePolicy,
    TinyTrainPolicy,
    TinyTrainRandomPolicy,
)

__all__ = [
    "PUBLISHED_MODELS",
    "BiasPolicy",
    "Choices",
    "Contributions",
    "ElasticPolicy",
    "FullPolicy",
    "GradientFilterPolicy",
    "HeadPolicy",
    "JointPolicy",
    "JointSelection",
    "LastKPolicy",
    "Limits",
    "Mode",
    "Plan",
    "PlanRequest",
    "Policy",
    "PublishedModel",
    "RandomPolicy",
    "Scheme",
    "SchemeCosts",
    "Selection",
    "SparseUpdatePolicy",
    "TinyTrainInputPolicy",
    "TinyTrainKnapsackPolicy",
    "TinyTrainNoDepthwisePolicy",
    "TinyTrainPolicy",
    "TinyTrainRandomPolicy",
    "fit_contributions",
    "joint_knapsack",
    "make_policy",
    "policies",
    "prefix_knapsack",
    "register_policy",
    "scheme_costs",
    "search_scheme",
]
