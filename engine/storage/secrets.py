"""Secrets in URLs: refused in configurations, hidden in messages."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

SECRET = re.compile(r"key|secret|token|passw|credential|signature", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """The URL; ValueError, which does not show it, where it holds a secret."""
    if "://" in url:
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        if (at and (":" in user or parts.scheme == "s3")) or any(SECRET.search(k) for k, _ in parse_qsl(parts.query)):
            raise ValueError("must hold no secret; give credentials by the environment, as in AWS_ACCESS_KEY_ID")
    return url


def redacted(text: str) -> str:
    """Without the user and password of any address in it, nor a secret among its arguments."""
    text = re.sub(r"(?<=://)[^/\s]*@|(?<=password=)[^&\s]*", lambda m: "***@" if m[0].endswith("@") else "***", text)
    return re.sub(rf"(?i)([?&][^=&\s]*(?:{SECRET.pattern})[^=&\s]*=)[^&\s'\"]*", r"\1***", text)
