"""Unequal devices: their properties, the time of a round on them, and a layer around Flower that computes it.

Names are loaded when they are first used, see `fl_elastic.lazy_names`.
"""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late

if TYPE_CHECKING:
    from fl_elastic_simulations.unequal.fleet import Fleet
    from fl_elastic_simulations.unequal.grid import UnequalGrid
    from fl_elastic_simulations.unequal.measuring import measuring_mod

__all__ = ["Fleet", "UnequalGrid", "measuring_mod"]

_MODULES = {"Fleet": "fleet", "UnequalGrid": "grid", "measuring_mod": "measuring"}

__getattr__, __dir__ = loaded_late(__name__, _MODULES)
