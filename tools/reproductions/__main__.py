"""Write the page of reproductions, and those of topics."""

from __future__ import annotations

from fedfleet.engine.storage.atomic_write import write

from .page import PAGE, page
from .topics import PAGES, topic_page

if __name__ == "__main__":
    for place, text in ((PAGE, page()), *((one, topic_page(one)) for one in PAGES)):
        write(place, text)
        print(f"{place} is written")
