"""How much samples repeat themselves, beside the validation text: python measure.py RUN DATA

Prints a row for the text, for the former options of sample.py, and for its defaults.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO))

import numpy as np

from data.stream import TokenStream
from data.tokenizers import get_tokenizer

SAMPLES, TOKENS = 32, 300
BEFORE = "--temperature 0.8 --top_k 200 --min_p 0 --dry_multiplier 0"


def repeated(text: str) -> float:
    """Return the share of windows of 12 characters that occur in the 200 characters before them."""
    starts = range(12, len(text) - 11)
    found = [text[i : i + 12] in text[max(0, i - 200) : i] for i in starts]
    return mean(found or [0])


def distinct(text: str) -> float:
    """Return the share of 4-grams of words and signs that have not occurred before."""
    words = re.findall(r"\w+|[^\w\s]", text)
    grams = list(zip(words, words[1:], words[2:], words[3:]))
    return len({*grams}) / max(1, len(grams))


def sample(*flags: str) -> str:
    command = [sys.executable, REPO / "sample.py", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def real_texts(data: str) -> list[str]:
    """Cut as many texts, as long, from the validation split, evenly spread."""
    stream = TokenStream(data, TOKENS)
    tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
    starts = np.linspace(0, stream.val.n_tokens - TOKENS, SAMPLES, dtype=np.int64)
    rows = stream.val.read_sequences(starts, TOKENS)
    return [tokenizer.decode_bytes(row[row != stream.eot]).decode(errors="ignore") for row in rows]


def row(run: str, name: str, texts: list[str]) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("<|endoftext|>".join(texts))
        file.flush()
        table = sample(run, "--perplexity", file.name)
    bits = re.search(r"(?m)^per byte.* (\S+)$", table)[1]
    shares = [repeated(text) for text in texts]
    loops = mean(share > 0.5 for share in shares)
    fresh = mean(map(distinct, texts))
    print(f"| {name} | {mean(shares):.2f} | {loops:.0%} | {fresh:.2f} | {float(bits):.2f} |", flush=True)


def main(run: str, data: str, *others: str) -> None:
    row(run, "validation text", real_texts(data))
    for flags in (BEFORE, "", *others):
        size = f"--num_samples {SAMPLES} --max_new_tokens {TOKENS}"
        printed = sample(run, *size.split(), *flags.split())
        row(run, flags or "default", re.split(r"(?m)^--- seed \d+\n", printed)[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
