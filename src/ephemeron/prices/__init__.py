"""What things cost, from dated files that name their sources."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.events import Traffic

DEFAULT = "aws-us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """One cloud's prices for functions and for one kind of channel."""

    name: str
    as_of: str
    """ISO date of the price lists."""
    gb_second_usd: float
    invocation_usd: float
    put_usd: float = 0.0
    get_usd: float = 0.0
    """Per read, found or not: a poll costs a get."""
    list_usd: float = 0.0
    delete_usd: float = 0.0
    byte_usd: float = 0.0
    """Per byte moved, for caches that bill by volume."""
    server_hour_usd: float = 0.0
    """Per hour and parameter server."""

    def storage_usd(self, traffic: Traffic) -> float:
        """FasDL, equations 3-26 and 3-28, with the polls, lists and deletes that those leave out."""
        return (
            traffic.puts * self.put_usd
            + (traffic.gets + traffic.polls) * self.get_usd
            + traffic.lists * self.list_usd
            + traffic.deletes * self.delete_usd
            + (traffic.bytes_up + traffic.bytes_down) * self.byte_usd
        )

    def functions_usd(self, gb_seconds: float, invocations: int) -> float:
        """FasDL, equation 3-23, plus the price of each invocation."""
        return gb_seconds * self.gb_second_usd + invocations * self.invocation_usd


def load_prices(service: str, file: str | Path | None = None) -> Prices:
    """Prices with a channel of the given service (`objects`, `cache`, `server`, `memory`).

    Raises:
        JobError: the file is absent or lacks a value.
    """
    try:
        text = Path(file).read_text() if file else files(__package__).joinpath(f"{DEFAULT}.toml").read_text()
        raw = tomllib.loads(text)
        as_of = raw["as_of"]
        storage: dict[str, float] = {}
        if service == "objects":
            storage = {k: float(raw["objects"][k]) for k in ("put_usd", "get_usd", "list_usd", "delete_usd")}
        elif service == "cache":
            ecpu = float(raw["cache"]["ecpu_usd"])
            storage = {"put_usd": ecpu, "get_usd": ecpu, "list_usd": ecpu, "delete_usd": ecpu, "byte_usd": ecpu / 1000}
        elif service == "server":
            storage = {"server_hour_usd": float(raw["server"]["hour_usd"])}
        return Prices(
            name=str(raw["name"]),
            as_of=as_of.isoformat() if isinstance(as_of, datetime.date) else str(as_of),
            gb_second_usd=float(raw["functions"]["gb_second_usd"]),
            invocation_usd=float(raw["functions"]["invocation_usd"]),
            **storage,
        )
    except FileNotFoundError:
        raise JobError(f"price file {file} does not exist") from None
    except OSError as e:
        raise JobError(f"price file {file} cannot be read: {e.strerror}") from None
    except (KeyError, ValueError, TypeError) as e:
        raise JobError(
            f"price file {file or DEFAULT}: missing or bad value {e}", remedy="compare it with the built-in one"
        ) from None
