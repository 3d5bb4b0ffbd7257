"""Which fraction of a dataset's n-grams have occurred before: `python repeats.py TOKENS FOLDER ...`."""

import sys
from pathlib import Path

import numpy as np

for folder in sys.argv[2:]:
    shards = [np.fromfile(path, "<u2", offset=1024) for path in sorted(Path(folder).glob("*train*.bin"))]
    tokens = np.concatenate(shards)[: int(sys.argv[1])].astype(np.int64)
    ngrams, fractions = tokens, []
    for length in range(2, 7):
        ngrams = ngrams[:-1] * 1024 + tokens[length - 1 :]  # vocabularies of up to 1,024 tokens
        fractions.append(1 - len(set(ngrams.tolist())) / len(ngrams))
    print(Path(folder).name, len(tokens), *(f"{fraction:.3f}" for fraction in fractions))
