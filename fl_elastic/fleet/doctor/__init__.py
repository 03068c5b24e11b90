"""Find out why a node or a server will not work, and say how to mend it."""

from fl_elastic.fleet.doctor.checkup import World, check_up
from fl_elastic.fleet.doctor.finding import Finding

__all__ = ["Finding", "World", "check_up"]
