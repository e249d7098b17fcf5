"""What pages in docs/ get when the site is built: sections of the README, and links to the methods of a study."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import part_name
from fedfleet.tune.files import read_yaml

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"<!-- README: (.+?) -->")
"""Where a page gets the section of the README that has this title, without the title."""


def with_sections(markdown: str, pages: Mapping[str, str]) -> str:
    """A page with the sections of the README for which it has places. pages: file of the repository -> its page on the
    site, for links to files that do not lie in docs/."""
    return PLACE.sub(lambda place: section(place[1], pages), markdown)


def section(title: str, pages: Mapping[str, str]) -> str:
    """A section of the README. Its links are made those of a page in docs/."""
    text = (ROOT / "README.md").read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0].strip()
    for file, page in pages.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text.replace("](docs/", "](")


def with_methods(markdown: str, page: str) -> str:
    """The page of a study's report, with links to the pages of its methods below its title."""
    study = ROOT / "docs" / PurePosixPath(page).parent / "study.yaml"
    if not page.startswith("results/") or not study.is_file():
        return markdown
    labels: dict[str, list[str]] = {}
    for label, method in read_yaml(study, str(study))["methods"].items():
        labels.setdefault(part_name(method), []).append(label)
    title, _, rest = markdown.partition("\n")
    links = [link(name, those) for name, those in labels.items() if name in Registry().tables["METHODS"]]
    return f"{title}\n\nPages of the methods: {', '.join(links)}.\n{rest}"


def link(name: str, labels: list[str]) -> str:
    """A link to the page of a method, and how the study calls it, if it has other names for it."""
    others = ", ".join(label for label in labels if label != name)
    return f"[`{name}`](../../reference/methods/{name}.md)" + (f" ({others})" if others else "")
