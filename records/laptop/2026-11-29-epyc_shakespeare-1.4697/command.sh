#!/usr/bin/env bash
# From the repository's root: command.sh OUTPUT_FOLDER DATA_FOLDER (as `python data/prepare.py shakespeare` makes it)
python train_gpt.py --data "$2" --out_dir "$1" --trials 5 --compile --n_layer 4 --seq_len 256 --window L --short_frac 0 --ngram 6 --ngram_rows 65536 --max_steps 168 --ngram_dropout 0.45 --eval_every 42
