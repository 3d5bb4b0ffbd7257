#!/usr/bin/env bash
# From the repository's root: command.sh OUTPUT_FOLDER DATA_FOLDER (as `python data/prepare.py shakespeare` makes it)
python train_gpt.py --data "$2" --out_dir "$1" --trials 5 --compile --n_layer 1 --n_head 1 --n_embd 64 --seq_len 128 --window L --short_frac 0 --batch_tokens 2048 --max_steps 35 --ngram 5 --ngram_rows 32768 --ngram_dropout 0 --adam_lr 0.025 --muon_lr 0.05 --eval_every end
