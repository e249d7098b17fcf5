"""The documentation site: pages that are generated from the code when `mkdocs build` runs (`make docs`)."""
