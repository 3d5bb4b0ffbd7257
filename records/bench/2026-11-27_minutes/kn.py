"""Bits per byte of a text's last tenth, by n-gram counts of the rest: python kn.py TEXT ORDER

Interpolated Kneser-Ney with a fixed discount, on bytes.
"""

import math
import sys
from collections import Counter, defaultdict
from pathlib import Path


def count_ngrams(text: bytes, order: int) -> list[dict]:
    """For each length of context: context -> counts of the bytes after it (at the longest), or of
    the different contexts before both (at shorter ones)."""
    tables = [defaultdict(Counter) for _ in range(order + 1)]
    for end in range(order, len(text)):
        tables[order][text[end - order : end]][text[end]] += 1
    for length in range(order - 1, -1, -1):
        for context, followers in tables[length + 1].items():
            tables[length][context[1:]].update(followers.keys())
    return tables


def probability(tables: list[dict], history: bytes, byte: int) -> float:
    p = 1 / 256
    for length, table in enumerate(tables):
        followers = table.get(history[len(history) - length :])
        if followers:
            discount = 0.75 if length < 4 else 0.9
            kept = max(followers[byte] - discount, 0) + discount * len(followers) * p
            p = kept / followers.total()
    return p


if __name__ == "__main__":
    text, order = Path(sys.argv[1]).read_bytes(), int(sys.argv[2])
    start = len(text) * 9 // 10
    tables = count_ngrams(text[:start], order)
    bits = [
        -math.log2(probability(tables, text[i - order : i], text[i]))
        for i in range(start, len(text))
    ]
    print(f"{sum(bits) / len(bits):.3f}")
