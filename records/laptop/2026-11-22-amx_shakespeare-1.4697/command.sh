#!/usr/bin/env bash
# From the repository's root: command.sh OUTPUT_FOLDER DATA_FOLDER (as `python data/prepare.py shakespeare` makes it)
python train_gpt.py --data "$2" --out_dir "$1" --trials 5 --compile --n_layer 4 --seq_len 256 --ngram 6 --ngram_rows 65536 --max_steps 250 --ngram_dropout 0.45 --muon_lr 0.03 --adam_lr 0.012 --eval_every 50 --eval_tokens 0
