"""A simulation study: how long do customers of a busy shop wait? As many shops are simulated as the mean has to be known precisely, and no more.

    python examples/simulation/waiting.py                                   # --width 2% is more precise; on a cloud: --platform aws --channel s3://…
    python examples/simulation/waiting.py --width 2%                        # goes on from the results that are there

Each shop is an item, whose random numbers depend on its number alone, so the study can be killed and continued with the same result. Needs
`pip install 'ephemeron[maps,report]'`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ephemeron.maps import map_items

CLERKS, CUSTOMERS, BUSY = 3, 4_000, 0.9


def day(shop: int, rng: np.random.Generator) -> dict[str, float]:
    """Simulates a day of a shop with `CLERKS` clerks, who are busy 90 % of the time.

    Args:
        shop: its number.
        rng: of this shop.

    Returns:
        Mean and 95th percentile of the waiting time, in units of the mean service time.
    """
    arrivals = np.cumsum(rng.exponential(1 / (CLERKS * BUSY), CUSTOMERS))
    services = rng.exponential(1.0, CUSTOMERS)
    free = np.zeros(CLERKS)
    waits = np.empty(CUSTOMERS)
    for n, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
        clerk = free.argmin()
        begin = max(arrival, free[clerk])
        waits[n], free[clerk] = begin - arrival, begin + service
    return {"shop": shop, "mean": float(waits.mean()), "late": float(np.quantile(waits, 0.95))}


def expected() -> float:
    """Mean waiting time of infinitely long days, by Erlang's formula."""
    load = CLERKS * BUSY
    terms = [load**k / np.prod(np.arange(1, k + 1), dtype=float) for k in range(CLERKS + 1)]
    waiting = terms[-1] / (1 - BUSY)
    return float(waiting / (sum(terms[:-1]) + waiting) / (CLERKS - load))


def draw(means: np.ndarray, path: Path) -> None:
    """The running estimate with its interval, and the distribution over shops."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    count = np.arange(2, len(means) + 1)
    running = np.cumsum(means)[1:] / count
    spread = np.array([means[:n].std(ddof=1) for n in count]) / np.sqrt(count) * 1.96
    left.fill_between(count, running - spread, running + spread, alpha=0.3, label="95 % interval")
    left.plot(count, running, label="mean of the shops")
    left.axhline(expected(), color="0.4", linestyle="--", label="days without end (Erlang)")
    left.set(xlabel="shops", ylabel="mean waiting time")
    left.legend()
    right.hist(means, bins=30)
    right.set(xlabel="mean waiting time of a shop", ylabel="shops")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", default="5%", help="of the 95 %% interval of the mean [default: 5%%]")
    parser.add_argument("--most", type=int, default=20_000, help="shops, at most")
    parser.add_argument("--platform", default="local")
    parser.add_argument("--channel")
    parser.add_argument("--out", type=Path, default=Path("simulation"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    result = map_items(
        day,
        range(options.most),
        out=options.out / "shops.jsonl",
        stop_when=options.width,
        estimate="mean",
        platform=options.platform,
        channel=options.channel,
        code_version="v1",  # this file is the main program, and its other functions do not matter
    )
    means = np.array([shop["mean"] for shop in result if shop is not None])
    draw(means, options.out / "waiting.png")
    print(f"{result.estimate}; without end {expected():.3f}; {result.computed} shops computed now, {result.recorded} before; {result.bill}")
    print(f"picture: {options.out / 'waiting.png'}")


if __name__ == "__main__":
    main()
