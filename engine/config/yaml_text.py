"""Texts in YAML, read by PyYAML's safe loader: only plain data comes out, and whatever is wrong is one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import yaml

from ..errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key <<, whose value is a mapping of defaults for the mapping that contains the key."""

MOST_VALUES = 100_000
"""The largest number of values in a text, after aliases were replaced by copies of what they stand for. A few aliases
of aliases would otherwise make billions of values out of some lines."""


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses repeated keys and reads 1e-3 as a number."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # of whatever kind the scalar's type raises
            raise _refused(f"{node.value[:40]!r} is no {node.tag.rpartition(':')[2]}", node) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise _refused(f"the key {key.value} is given twice", key)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            raise _refused(f"<< makes more than {MOST_VALUES:,} keys", node)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _refused(why: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def parse(text: str, where: str) -> Any:
    """The data of a YAML text; `where` names the text in the ConfigError."""
    try:
        return own(yaml.load(text, Loader), count())
    except RecursionError:
        raise ConfigError(
            f"{where} is not valid YAML: it is nested too deeply, or an alias contains itself; write it flatter, or "
            "remove the alias"
        ) from None
    except OverflowError:
        raise ConfigError(
            f"{where} has more than {MOST_VALUES:,} values when its aliases are replaced by what they stand for; write "
            "fewer of them"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where} is not valid YAML{at}: {getattr(error, 'problem', None) or error}") from None


def own(value: Any, counter: Iterator[int] | None = None) -> Any:
    """A deep copy in which the places of a YAML alias share no mapping, so that an override changes one of them.

    counter: of the values so far; raises OverflowError if there would be more than MOST_VALUES. None: no limit.
    """
    if counter is not None and next(counter) > MOST_VALUES:
        raise OverflowError
    if isinstance(value, dict):
        return {key: own(inner, counter) for key, inner in value.items()}
    return [own(inner, counter) for inner in value] if isinstance(value, list) else value
