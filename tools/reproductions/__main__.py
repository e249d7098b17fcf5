"""Write the page of reproductions, and that of clients' own models."""

from __future__ import annotations

from fedfleet.engine.storage.atomic_write import write

from . import own_models
from .page import PAGE, page

if __name__ == "__main__":
    for place, text in ((PAGE, page()), (own_models.PAGE, own_models.own_models_page())):
        write(place, text)
        print(f"{place} is written")
