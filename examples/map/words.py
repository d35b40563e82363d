"""A word count: files are counted by functions, and counts are merged in a tree, so that the client gets one result.

python words.py ../../docs/*.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

WORD = re.compile(r"[a-z]+")


def count(text: str) -> Counter[str]:
    """Words of a text."""
    return Counter(WORD.findall(text.lower()))


def merge(a: Counter[str], b: Counter[str]) -> Counter[str]:
    """Both counts together."""
    return a + b


def main(files: list[str], platform: str = "local") -> None:
    import ephemeron

    texts = [Path(file).read_text() for file in files]
    with ephemeron.FunctionExecutor(platform=platform) as pool:
        counts = pool.map_reduce(count, texts, merge, chunksize=4).result()
        bill = pool.bill()
    for word, n in counts.most_common(10):
        print(f"{n:6}  {word}")
    print(bill)


if __name__ == "__main__":
    main(sys.argv[1:] or [str(path) for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))])
