"""Data for both targets: rows on disk -> samples -> micro-batches, the same on every rank.

    files.py      JSON, JSONL and Parquet files -> rows by number, without reading a file into memory
    selection.py  which files and rows a split has
    rows.py       rows -> conversations with images
    images.py     paths, headers, pixels
    processor.py  the Hugging Face processor of a model folder, without torchvision
    templates/    conversation -> token ids and which of them are trained
    sample.py     one examined row, as the collator takes it
    examine.py    row -> sample, dropped with a reason, or refused
    preprocess.py every row examined before training, here or in worker processes (workers.py)
    store.py      samples in an Arrow file
    cache.py      samples kept between runs, by everything they depend on (stamps.py: image files)
    dataset.py    samples by index; drawn.py: the same, examined when they are drawn
    report.py     what became of the rows
    positions.py  M-RoPE positions, one function per text decoder
    collator.py   samples -> one padded micro-batch
    sampler.py    the order of samples, a function of (seed, epoch) alone
    preload.py    the next micro-batch copied to the device while this one computes
    loader.py     `build_loader`: all of it, for one data-parallel rank

Training calls `loader.build_loader`; the rest is reached through it.
"""
