"""A config from the Hugging Face hub: the cache, else one short request and a download."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_REQUEST_SECONDS = 10
_FILE = "config.json"


class HubError(Exception):
    """The hub has no such config, or cannot be reached; the message is one line."""


def read_hub_config(hub_id: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """The fields of the config of `hub_id`, with transformers' defaults filled in.

    Raises:
        HubError: it is neither in the cache nor on the hub, or transformers does not know its type.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from transformers import AutoConfig

    with _without_logs():
        try:
            config = AutoConfig.from_pretrained(
                hub_id, trust_remote_code=trust_remote_code, local_files_only=True
            )
            return dict(config.to_dict())
        except OSError:
            pass  # not in the cache
        except Exception as error:
            raise HubError(_one_line(error)) from error
        try:
            # Without a network this fails at once, where transformers tries for half a minute.
            get_hf_file_metadata(hf_hub_url(hub_id, _FILE), timeout=_REQUEST_SECONDS)
            config = AutoConfig.from_pretrained(hub_id, trust_remote_code=trust_remote_code)
            return dict(config.to_dict())
        except Exception as error:  # each of the hub's clients has its own kinds
            raise HubError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__} {lines[0].rstrip('.')}".strip()


@contextmanager
def _without_logs() -> Iterator[None]:
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)
