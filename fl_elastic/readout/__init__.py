"""Places of a model that a head reads, the choice of the best ones, and a model that ends there.

Names are loaded when they are first used, see `fl_elastic.lazy_names`.
"""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late

if TYPE_CHECKING:
    from fl_elastic.readout.candidates import candidate_places
    from fl_elastic.readout.loading import loaded
    from fl_elastic.readout.place import Place
    from fl_elastic.readout.poolings import POOLINGS
    from fl_elastic.readout.readout_module import Readout
    from fl_elastic.update.manifest import places_of

__all__ = ["POOLINGS", "Place", "Readout", "candidate_places", "loaded", "places_of"]

_MODULES = {
    "POOLINGS": "poolings",
    "Place": "place",
    "Readout": "readout_module",
    "candidate_places": "candidates",
    "loaded": "loading",
    "places_of": "fl_elastic.update.manifest",
}

__getattr__, __dir__ = loaded_late(__name__, _MODULES)
