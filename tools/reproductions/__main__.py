"""Write the page of reproductions."""

from __future__ import annotations

from fedfleet.engine.storage.atomic_write import write

from .page import PAGE, page

if __name__ == "__main__":
    write(PAGE, page())
    print(f"{PAGE} is written")
