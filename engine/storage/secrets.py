"""Secrets in URLs: they are refused in configurations and hidden in messages."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SECRET = re.compile(r"key|secret|token|passw|credential|signature", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """Returns the URL. Raises ValueError, without showing the URL, if it holds a secret."""
    if "://" in url:
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        if (at and (":" in user or parts.scheme == "s3")) or any(SECRET.search(k) for k, _ in parse_qsl(parts.query)):
            raise ValueError("must hold no secret; give credentials in the environment, as in AWS_ACCESS_KEY_ID")
    return url


def redacted(text: str) -> str:
    """The text with users, passwords and secret arguments of all addresses in it replaced by ***."""
    text = re.sub(r"(?<=://)[^/\s]*@|(?<=password=)[^&\s]*", lambda m: "***@" if m[0].endswith("@") else "***", text)
    return re.sub(rf"(?i)([?&][^=&\s]*(?:{SECRET.pattern})[^=&\s]*=)[^&\s'\"]*", r"\1***", text)


def redacted_data(data: Any) -> Any:
    """A copy of plain data in which every text is redacted."""
    if isinstance(data, dict):
        return {key: redacted_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(redacted_data(value) for value in data)
    return redacted(data) if isinstance(data, str) else data
