"""Write the page of reproductions, those of topics, and the tables of pages that are written by hand."""

from __future__ import annotations

from fedfleet.engine.storage.atomic_write import write

from .page import PAGE, page
from .tables import hand_written_pages, with_tables
from .topics import PAGES, topic_page

if __name__ == "__main__":
    pages = (*((one, topic_page(one)) for one in PAGES), *((one, with_tables(one)) for one in hand_written_pages()))
    for place, text in ((PAGE, page()), *pages):
        write(place, text)
        print(f"{place} is written")
