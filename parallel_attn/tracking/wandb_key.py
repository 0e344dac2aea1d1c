"""Is there a W&B API key on this machine? Found without ever asking."""

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

# W&B's hosted service has gone by more than one host name; a key stored under the old one still serves.
_HOSTED = "api.wandb.ai"


def find_api_key(base_url: str, stored_key: str | None = None) -> str | None:
    """The API key for the server `base_url`: from WANDB_API_KEY, W&B's settings (`stored_key`) or the netrc file.

    Returns None if there is none; an unreadable or broken netrc file counts as none.
    """
    return os.environ.get("WANDB_API_KEY") or stored_key or _key_in_netrc(base_url)


def _key_in_netrc(base_url: str) -> str | None:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        machines = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    hosts = [urlsplit(base_url).netloc]
    if "WANDB_BASE_URL" not in os.environ:
        hosts.append(_HOSTED)
    for host in hosts:
        if host in machines and machines[host][2]:
            return machines[host][2]
    return None
