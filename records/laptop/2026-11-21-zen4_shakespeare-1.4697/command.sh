#!/usr/bin/env bash
# From the repository's root: command.sh OUTPUT_FOLDER DATA_FOLDER (as `python data/prepare.py shakespeare` makes it)
python train_gpt.py --data "$2" --out_dir "$1" --trials 3 --compile --n_layer 6 --ngram 6 --ngram_rows 65536 --ngram_dropout 0.6 \
    --confidence_penalty 0.1 --max_steps 1200 --eval_every 0 --eval_tokens 0
