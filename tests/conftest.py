"""One thread, as DESIGN states its figures: an fp32 matrix product of fewer than 12 rows depends on the thread count."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
