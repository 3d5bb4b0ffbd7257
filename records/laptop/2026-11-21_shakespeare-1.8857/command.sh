#!/usr/bin/env bash
# From the repository's root: command.sh OUTPUT_FOLDER DATA_FOLDER (as `python data/prepare.py shakespeare` makes it)
python train_gpt.py --data "$2" --out_dir "$1" --trials 3 --n_layer 1 --n_head 1 --n_embd 64 --seq_len 64 \
    --batch_tokens 1024 --max_steps 140 --ngram 4 --ngram_rows 16384 --ngram_dropout 0 --eval_every 0 --eval_tokens 0
