"""train_gpt.py as on a card of so many GB (MiB x 1000 of its label): small_card.py 24 FLAGS"""
import sys
sys.path.insert(0, ".")
from runtime import set_environment
set_environment()
import torch
import train_gpt
if torch.cuda.is_available():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]) * 0.984 * 2**30 / total)  # an RTX 4090: 24,210 MiB in CUDA
code = train_gpt.main(sys.argv[2:])
if torch.cuda.is_available():
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB allocated, {torch.cuda.max_memory_reserved() / 2**30:.2f} reserved")
sys.exit(code)
