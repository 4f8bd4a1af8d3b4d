"""Data for both targets: rows on disk -> samples -> micro-batches, the same on every rank.

    rows.py       JSON / JSONL rows -> conversations with image paths
    images.py     paths, headers, pixels
    processor.py  the Hugging Face processor of a model folder, without torchvision
    templates/    conversation -> token ids and which of them are trained
    sample.py     one examined row, as the collator takes it
    examine.py    row -> sample, dropped with a reason, or refused
    dataset.py    every row examined before training
    positions.py  M-RoPE positions, one function per text decoder
    collator.py   samples -> one padded micro-batch
    sampler.py    the order of samples, a function of (seed, epoch) alone
    loader.py     `build_loader`: all of it, for one data-parallel rank

Training calls `loader.build_loader`; the rest is reached through it.
"""
