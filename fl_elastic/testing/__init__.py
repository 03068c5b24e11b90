"""Conformance checks and synthetic cases for authors of a policy, a score, a codec, a rule or a pooling.

Each function returns small checks. A check takes the plug-in's class or an instance, and raises AssertionError if
the plug-in breaks a rule of its interface. With pytest::

    @pytest.mark.parametrize("check", policy_checks(), ids=name_of)
    def test_my_policy(check):
        check(MyPolicy)
"""

from fl_elastic.testing.codecs import codec_checks
from fl_elastic.testing.importances import channel_score_checks, importance_checks
from fl_elastic.testing.policies import policy_checks
from fl_elastic.testing.poolings import pooling_checks
from fl_elastic.testing.profiles import made_up_profile
from fl_elastic.testing.rules import rule_checks
from fl_elastic.testing.subjects import Check, name_of

__all__ = [
    "Check",
    "channel_score_checks",
    "codec_checks",
    "importance_checks",
    "made_up_profile",
    "name_of",
    "policy_checks",
    "pooling_checks",
    "rule_checks",
]
